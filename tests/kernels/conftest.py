"""Without a GPU the Triton kernels run in Triton's interpreter, chosen before the import."""

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
from triton.runtime import interpreter

# the interpreter of Triton 3.6 takes int() of arrays with one item, which numpy 2.4 refuses:
# without this no kernel with a loop runs (2026-11)
if triton.__version__.startswith("3.6."):
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
