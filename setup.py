"""The one thing that pyproject.toml cannot say yet: the C library of a CPU.

It includes no header of Python or torch and is called through ctypes, so any version may load it.
Where there is no C compiler the build goes on without it, and the torch reference serves.
"""

from pathlib import Path

from setuptools import Extension, setup

HERE = Path("kernels/cpu")
PAGES = Extension(
    "disagg.kernels.cpu._pages",
    sources=[str(path) for path in sorted(HERE.glob("*.c"))],
    depends=[str(path) for path in sorted(HERE.glob("*.h"))],
    # encoders promise the reference's bytes: a * b + c is rounded as often as they say. Sums wrap
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-g0",
        "-ffp-contract=off",
        "-fwrapv",
        "-Wno-psabi",
    ],
    extra_link_args=["-lm"],
    optional=True,
)

setup(ext_modules=[PAGES])
