"""A step's new tokens on a CPU, and the pages that they complete: reference/encode.py is the spec.

The C library copies the tokens, where infinities saturate. It also seals the pages that it can
encode; the reference seals the others.
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
    arena: Tensor,
    k: Tensor,
    v: Tensor | None,
    rows: NewRows,
    sealing: Sealing | None = None,
) -> None:
    """As the reference, to the byte."""
    is_served = k.dtype in TYPES and rows.fmt.head_dim % 16 == 0
    if backend() == TORCH or not is_served:
        reference.append(arena, k, v, rows, sealing)
        return
    _append_raw(arena, k, v, rows)
    if sealing is None:
        return
    fmt = sealing.fmt
    completed = reference.completed_pages(arena, k.shape[1], rows, sealing)
    for page_k, page_v, cut, target in completed:
        if is_encoded(fmt, page_k):
            seal_pages(page_k, page_v, target, fmt, cut)
        else:
            blocks, _ = reference.encode(page_k, page_v, fmt, cut)
            store_blocks(target, blocks)


def _append_raw(arena: Tensor, k: Tensor, v: Tensor | None, rows: NewRows) -> None:
    k = readable(k, k.dtype)
    v = k if v is None else readable(v, k.dtype)  # latents have none to read
    pages = rows.pages.contiguous()
    slots = rows.slots.contiguous()
    job = AppendC(
        arena=address(arena),
        k=address(k),
        v=address(v),
        pages=address(pages),
        slots=address(slots),
        rows=k.shape[0],
        heads=k.shape[1],
        k_row=k.stride(0),
        k_head=k.stride(1),
        v_row=v.stride(0),
        v_head=v.stride(1),
        type=TYPES[k.dtype],
        format=ctypes.addressof(format_of(rows.fmt)),
        base=rows.base,
        layer=0,
    )
    call("disagg_append", job)
