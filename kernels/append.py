"""Writing a step's new tokens into raw pages on a GPU: the Triton form of append_raw."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.formats import RawFormat


@triton.jit
def append_raw_kernel(
    arena_ptr, k_ptr, v_ptr, pages_ptr, slots_ptr, base, k_row, k_head, v_row, v_head,
    FMT: tl.constexpr,
):  # fmt: skip
    """K and V of one token and KV head. arena_ptr: the arena as items of the raw dtype."""
    D: tl.constexpr = FMT.head_dim
    ITEM: tl.constexpr = arena_ptr.dtype.element_ty.primitive_bitwidth // 8
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    page, slot = tl.load(pages_ptr + i_row).to(tl.int64), tl.load(slots_ptr + i_row)
    o_d = tl.arange(0, triton.next_power_of_2(D))
    m_d = o_d < D
    p_k = k_ptr + i_row.to(tl.int64) * k_row + i_head * k_head + o_d
    p_v = v_ptr + i_row.to(tl.int64) * v_row + i_head * v_head + o_d
    at = page * (128 // ITEM) + base // ITEM + i_head * (FMT.block_bytes // ITEM) + slot * D + o_d
    tl.store(arena_ptr + at + FMT.k // ITEM, tl.load(p_k, mask=m_d, other=0), mask=m_d)
    tl.store(arena_ptr + at + FMT.v // ITEM, tl.load(p_v, mask=m_d, other=0), mask=m_d)


def append_raw(
    arena: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    slots: Tensor,
    fmt: RawFormat,
    base: int,
) -> None:
    """Write one token per row into raw pages. Shapes as in reference_pages.append_raw."""
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the channels of k and v are not adjacent in memory")
    if not k.shape[0]:
        return
    append_raw_kernel[(k.shape[0], k.shape[1])](
        arena.view(getattr(torch, fmt.dtype)), k, v, pages, slots, base,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), fmt, num_warps=1,
    )  # fmt: skip
