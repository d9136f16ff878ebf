"""Stable keys for Triton's cache of compiled kernels.

A key is made of the source of a kernel and its helpers, and their globals. Triton 3.6 omits the
globals of a helper that no kernel has used before (2026-11; fixed in 3.9). Its keys therefore
depend on which kernel runs first, and a restart with other codecs compiled everything again.
Here all keys are computed in one order, before any launch.
"""

from functools import cache
from importlib import import_module

MODULES = (
    "bits",
    "encode",
    "append",
    "attend",
    "latent",
    "combine",
    "lowrank",
    "aligned",
)


@cache
def settle() -> None:
    """Compute the keys of all kernels, once per process. The interpreter has none."""
    for name in MODULES:
        module = import_module(f"disagg.kernels.gpu.{name}")
        for attribute, kernel in vars(module).items():
            if attribute.endswith("_kernel"):
                getattr(kernel, "cache_key", None)
