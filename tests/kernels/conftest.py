"""Without a GPU the Triton kernels run in Triton's interpreter, chosen before the import."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from benchmarks.gpu.interpreter import mend

mend()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The interpreter takes log2(0) where no token is visible."""
    with np.errstate(divide="ignore"):
        yield
