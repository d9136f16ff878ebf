"""Without a GPU the Triton kernels run in Triton's interpreter, chosen before the import."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
from triton.runtime import interpreter

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

# the interpreter of Triton 3.6 takes int() of arrays with one item, which numpy 2.4 refuses:
# without this no kernel with a loop runs (2026-11)
if TRITON == (3, 6):
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The interpreter takes log2(0) where no token is visible."""
    with np.errstate(divide="ignore"):
        yield


def round_once(self: Any, *numbers: Any) -> Any:
    """As an fma does: products of fp32 are exact in fp64."""
    x, y, z = (number.data.astype(np.float64) for number in numbers)
    dtype = numbers[2].data.dtype
    return interpreter.TensorHandle((x * y + z).astype(dtype), numbers[2].dtype.scalar)


# that of Triton 3.6 and 3.7 multiplies, rounds, adds and rounds again (2026-11)
if TRITON < (3, 9):
    interpreter.InterpreterBuilder.create_fma = round_once
