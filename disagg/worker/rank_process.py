"""The process of a rank other than 0: `python -m disagg.worker.rank_process FD`.

FD: number of the socket to rank 0, which the process inherits

It ends with the process of rank 0, also when it is frozen, where the system is Linux; elsewhere as
soon as it reads its socket.
"""

import ctypes
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from disagg.engine.orders import unpack_order
from disagg.worker.ranks import follow

PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with_parent() -> None:
    """Let the system kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    end_with_parent()
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
