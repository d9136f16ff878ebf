"""The keys under which Triton finds a compiled kernel again.

A key has the source of a kernel and of its helpers, and their globals. Triton 3.6 leaves out the
globals of a helper that no other kernel used before (2026-11; 3.9 does not): the key depends on
what a process runs first, so after a restart with other codecs kernels were compiled anew.
Here all keys are made in one order, before anything is launched.
"""

from functools import cache
from importlib import import_module

MODULES = ("bits", "encode", "append", "attend", "combine", "lowrank", "aligned")


@cache
def settle() -> None:
    """Make the keys of all kernels, once in a process. Under the interpreter there are none."""
    for name in MODULES:
        module = import_module(f"disagg.kernels.gpu.{name}")
        for attribute, kernel in vars(module).items():
            if attribute.endswith("_kernel"):
                getattr(kernel, "cache_key", None)
