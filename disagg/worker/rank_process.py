"""The process of a rank other than 0: `python -m disagg.worker.rank_process FD`.

FD: number of the socket to rank 0, which the process inherits
"""

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from disagg.engine.orders import unpack_order
from disagg.worker.ranks import follow


def main() -> None:
    # an interrupt of the terminal is for rank 0, which then closes the link
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        link = Connection(int(sys.argv[1]))
        follow(link, unpack_order(link.recv_bytes()))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not after torch's threads, which may wait for other ranks
    os._exit(0)


if __name__ == "__main__":
    main()
