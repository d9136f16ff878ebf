"""Triton's interpreter where a release of it is wrong: for rehearsals, and for tests of
kernels.
"""

from typing import Any

import numpy as np
import triton
from triton.runtime import interpreter

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


def mend() -> None:
    """Let kernels of this project run, and round as on a GPU."""
    if TRITON == (3, 6):
        _index_tensors()
    if TRITON < (3, 9):
        interpreter.InterpreterBuilder.create_fma = _round_once


def _index_tensors() -> None:
    """The interpreter of Triton 3.6 takes int() of arrays with one item, which numpy
    2.4 refuses: without this no kernel with a loop runs (2026-11)."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _round_once(self: Any, *numbers: Any) -> Any:
    """As an fma does: products of fp32 are exact in fp64. That of Triton 3.6 and 3.7
    multiplies, rounds, adds and rounds again (2026-11)."""
    x, y, z = (number.data.astype(np.float64) for number in numbers)
    dtype = numbers[2].data.dtype
    return interpreter.TensorHandle((x * y + z).astype(dtype), numbers[2].dtype.scalar)
