"""Asks a chip once whether its tensor cores take fp16 subnormals exactly; bits.py says why."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from disagg.kernels.bits import MAGIC, PLAIN, PTX, field, weight


@triton.jit
def subnormal_kernel(words_ptr, o_ptr, SPELLING: tl.constexpr):
    """o = sum over the columns of the codes in plane 0 of words [16, 16] int16, as 4-bit fields."""
    o_16 = tl.arange(0, 16)
    words = tl.load(words_ptr + o_16[:, None] * 16 + o_16[None, :])
    ones = tl.full([16, 16], 1.0, tl.float16)
    sums = tl.dot(field(words, 0, 0, 4, SPELLING), ones) * weight(0, 4, SPELLING)
    tl.store(o_ptr + o_16[:, None] * 16 + o_16[None, :], sums)


def takes_subnormals(device: torch.device, spelling: str) -> bool:
    """Whether sums over codes come out exact."""
    words = torch.arange(256, dtype=torch.int16, device=device).view(16, 16)
    sums = torch.empty(16, 16, device=device)
    subnormal_kernel[(1,)](words, sums, spelling, num_warps=1, enable_fp_fusion=False)
    exact = (words & 15).sum(1, dtype=torch.float32)
    return bool(torch.equal(sums, exact[:, None].expand(16, 16)))


@lru_cache
def spelling_for(device: torch.device) -> str:
    """How this device reads codes, by test; the first call must not be inside a CUDA graph."""
    if device.type != "cuda":
        return PLAIN
    wanted = PTX if torch.version.hip is None else PLAIN
    return wanted if takes_subnormals(device, wanted) else MAGIC
