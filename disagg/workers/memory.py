"""What a worker's process does with memory once everything is loaded."""

import atexit
import gc

from disagg.transfer.channel import tune_malloc


def settle_memory() -> None:
    """What was loaded stays: glibc keeps large buffers, the garbage collector looks at it no more.

    A full collection of all that torch and transformers made stops every thread for 0.2 s, in the
    middle of a decode step.
    """
    tune_malloc()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries look for what is left at the end
