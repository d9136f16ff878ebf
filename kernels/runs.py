"""The runs of a batch, found on the device in one launch: so a CUDA graph serves any lengths.

A run is the pages of a sequence that share a segment. Owners rise along a row, so a run begins
behind all pages of smaller owners.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENTS, PAGES = 16, 256  # of a sequence that a program takes together


@triton.jit(do_not_specialize=["segments", "width"])
def run_spans_kernel(
    lo_ptr, hi_ptr, owner_ptr, start_ptr, stop_ptr, segments, width,
    TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Spans of some runs of one sequence; arguments as below, row by row."""
    i_b, i_part = tl.program_id(0), tl.program_id(1)
    o_s, o_p = i_part * SEGMENTS + tl.arange(0, SEGMENTS), tl.arange(0, PAGES)
    lo, hi = tl.load(lo_ptr + i_b), tl.load(hi_ptr + i_b)
    pages = tl.minimum(tl.cdiv(hi, TOKENS), width)  # what is behind them is padding
    first = tl.zeros([SEGMENTS], tl.int32)
    end = tl.zeros([SEGMENTS], tl.int32)
    for i in range(0, pages, PAGES):
        p_owner = owner_ptr + i_b * width + i + o_p
        b_owner = tl.load(p_owner, mask=i + o_p < pages, other=1 << 30)[None, :]
        first += tl.sum((b_owner < o_s[:, None]).to(tl.int32), 1)
        end += tl.sum((b_owner <= o_s[:, None]).to(tl.int32), 1)
    i_run, m_s = i_b * segments + o_s, o_s < segments
    tl.store(start_ptr + i_run, tl.maximum(first * TOKENS, lo), mask=m_s)
    tl.store(stop_ptr + i_run, tl.minimum(end * TOKENS, hi), mask=m_s)


def run_spans(
    lo: Tensor, hi: Tensor, owner: Tensor, segments: int, tokens: int
) -> tuple[Tensor, Tensor]:
    """The tokens of every run that its sequence sees: two of [B * segments] int32.

    lo, hi: [B] int32 - of the sequence
    owner:  [B, P] int32 - the segment of each page; rises along a row, but for padding behind hi
    tokens: of a page
    """
    if not owner.is_contiguous() or owner.dtype != torch.int32:
        raise ValueError("owners are wanted in int32, contiguous in memory")
    batch, width = owner.shape
    # each for itself: Triton makes other kernels for addresses that are no multiples of 16
    start = torch.empty(batch * segments, dtype=torch.int32, device=owner.device)
    stop = torch.empty_like(start)
    run_spans_kernel[(batch, triton.cdiv(segments, SEGMENTS))](
        lo, hi, owner, start, stop, segments, width, tokens, SEGMENTS, PAGES,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return start, stop
