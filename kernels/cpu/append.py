"""A step's new tokens on a CPU, and the pages that they complete: reference/encode.py is the spec.

Tokens are copied by the C library, where infinities saturate; a page that it can encode goes from
the tail to its place.
"""

import ctypes

from torch import Tensor

from disagg.kernels.cpu.attend import readable
from disagg.kernels.cpu.encode import is_encoded, seal_pages
from disagg.kernels.cpu.library import (
    TORCH,
    TYPES,
    AppendC,
    address,
    backend,
    call,
    format_of,
)
from disagg.kernels.reference import encode as reference
from disagg.kernels.reference.pages import store_blocks
from disagg.kernels.sealing import NewRows, Sealing


def append(
    arena: Tensor, k: Tensor, v: Tensor, rows: NewRows, sealing: Sealing | None = None
) -> None:
    """As the reference, to the byte."""
    if backend() == TORCH or k.dtype not in TYPES or rows.fmt.head_dim % 16:
        reference.append(arena, k, v, rows, sealing)
        return
    _append_raw(arena, k, v, rows)
    if sealing is not None:
        fmt, heads = sealing.fmt, k.shape[1]
        for k, v, cut, target in reference.completed_pages(arena, heads, rows, sealing):
            if is_encoded(fmt, k):
                seal_pages(k, v, target, fmt, cut)
            else:
                store_blocks(target, reference.encode(k, v, fmt, cut)[0])


def _append_raw(arena: Tensor, k: Tensor, v: Tensor, rows: NewRows) -> None:
    k, v = readable(k, k.dtype), readable(v, k.dtype)
    held = rows.pages.contiguous(), rows.slots.contiguous()
    strides = (x.stride(i) for x in (k, v) for i in (0, 1))
    tensors = map(address, (arena, k, v, *held))
    where = TYPES[k.dtype], ctypes.addressof(format_of(rows.fmt)), rows.base, 0
    call("disagg_append", AppendC(*tensors, k.shape[0], k.shape[1], *strides, *where))
