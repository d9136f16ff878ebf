"""Is every way of reading codes right on this chip? Asked before anything is timed on it."""

from dataclasses import dataclass

import torch

from disagg.kernels import paged_attention, reduce, reference
from disagg.kernels.bits import MAGIC, PLAIN, PTX
from disagg.kernels.measured_formats import HEAD_DIM, page_format
from disagg.kernels.reference_encode import encode_quantized
from disagg.kernels.reference_pages import store_blocks
from disagg.kernels.selftest import spelling_for, takes_subnormals

TOKENS, HEADS = 320, 2


@dataclass(frozen=True)
class Check:
    """One spelling on one page format.

    exact_sums: whether the tensor cores take the subnormals, by selftest.py
    error:      of attention against the torch reference, relative
    chosen:     whether attention uses this spelling here
    """

    spelling: str
    bits: int
    exact_sums: bool
    error: float
    chosen: bool


def check_spellings(device: torch.device) -> list[Check]:
    """All spellings that can run on the device, at 2 and 4 bit."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    spellings = (PLAIN, PTX, MAGIC) if nvidia else (PLAIN, MAGIC)
    return [check_spelling(spelling, bits, device) for spelling in spellings for bits in (2, 4)]


def check_spelling(spelling: str, bits: int, device: torch.device) -> Check:
    """Attention of four heads over five pages, spelt so, against the reference."""
    fmt = page_format(bits)
    source = torch.Generator().manual_seed(bits)
    k, v = (torch.randn(HEADS, TOKENS, HEAD_DIM, generator=source) for _ in range(2))
    blocks = encode_quantized(k, v, fmt)
    stride = HEADS * fmt.block_bytes // 128
    pages = (torch.randperm(blocks.shape[0], generator=source) * stride).int()
    arena = torch.zeros(blocks.numel(), dtype=torch.uint8)
    store_blocks(arena, blocks, pages, 0)
    q = torch.randn(1, 1, 4 * HEADS, HEAD_DIM, generator=source)
    lo = torch.full((1, 1), 5, dtype=torch.int32)
    hi = lo + TOKENS - 8
    expected, _ = reference.attend_quantized(q, arena, pages[None], lo, hi, fmt, 0, HEADS, 0.1)
    q, arena, pages, lo, hi = (x.to(device) for x in (q, arena, pages[None], lo, hi))
    part = paged_attention.attend_quantized(q, arena, pages, lo, hi, fmt, 0, HEADS, 0.1, spelling)
    o = reduce.merge([part])
    return Check(
        spelling=spelling,
        bits=bits,
        exact_sums=takes_subnormals(device, spelling),
        error=float((o.cpu() - expected).norm() / expected.norm()),
        chosen=spelling_for(device) == spelling,
    )
