"""Decode attention over page tables on a GPU: the Triton form of reference.attend_* and merge.

Two launches: one program per unit of work, KV head and block of query columns writes a partial
result (raw_attention.py, piece_attention.py); one program per row of the answer merges them
(reduce.py). Shapes of launches and buffers follow from shapes of tensors alone and nothing is read
back, so a CUDA graph of them serves any lengths.
"""

import torch
import triton
from torch import Tensor

from disagg.kernels.formats import QuantFormat
from disagg.kernels.formats_paged import as_paged
from disagg.kernels.paged_pieces import attend_paged
from disagg.kernels.reduce import merge_kernel
from disagg.kernels.reference import Partial
from disagg.kernels.selftest import spelling_for


def attend_quantized(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: QuantFormat,
    base: int,
    heads: int,
    scale: float,
    spelling: str | None = None,
) -> Partial:
    """Attention over quantised pages, on the codes. Shapes as in reference.attend_quantized.

    spelling: how codes are read, of bits.py; None: as the chip takes them
    error: about 5e-4 relative (q times scale-of-K and p times scale-of-V are rounded to fp16)
    """
    return attend_paged(
        q, arena, pages, lo, hi, as_paged(fmt), base, heads, scale,
        spelling=spelling or spelling_for(q.device),
    )  # fmt: skip


def merge(parts: list[Partial]) -> Tensor:
    """Attention over the union of disjoint token sets. See reference.merge."""
    return join(parts)[0]


def join(parts: list[Partial]) -> Partial:
    """The same with its log-sum-exp, in one launch. See reference_kept.join."""
    for part in parts:
        if not all(x.is_contiguous() and x.dtype == torch.float32 for x in part):
            raise ValueError("parts are wanted in fp32, contiguous in memory")
    o, lse = torch.empty_like(parts[0][0]), torch.empty_like(parts[0][1])
    merge_kernel[(lse.numel(),)](
        tuple(part[0] for part in parts), tuple(part[1] for part in parts), o, lse,
        o.shape[-1], triton.next_power_of_2(o.shape[-1]), num_warps=1,
    )  # fmt: skip
    return o, lse
