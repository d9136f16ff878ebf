"""Makes the engine of a worker of a real service hang, for `hung_workers`.

Python imports this module when a process starts whose PYTHONPATH has this folder. In a worker that
Ray started, the next step of the engine never ends once the folder HANG_FOLDER of the environment
has a file that is named after the process.
"""

import os
import sys
import threading
import time
from pathlib import Path

RAY_WORKER = "default_worker.py"
POLL_S = 0.1


def hang_when_asked(order: Path) -> None:
    """Wait for the file, then hang the engine as a kernel does that never ends."""
    while not order.exists():
        time.sleep(POLL_S)
    # not before: the process may be about to choose its environment
    from disagg.engine.messages import Abort

    for thread in threading.enumerate():
        if thread.name.endswith("-engine"):
            engine = thread._target.__self__.engine  # type: ignore[attr-defined]
            engine._step = threading.Event().wait
            engine.submit(Abort("nobody"))  # an idle engine waits for a message


if any(RAY_WORKER in argument for argument in sys.orig_argv):
    threading.Thread(
        target=hang_when_asked,
        args=[Path(os.environ["HANG_FOLDER"], str(os.getpid()))],
        daemon=True,
    ).start()
