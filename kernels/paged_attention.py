"""Attention on codes over page tables on a GPU: the Triton form of reference.attend_quantized.

One launch: a program per unit of work, KV head and block of query columns writes a partial result
(piece_attention.py); reduce.py makes them one. Shapes of launches and buffers follow from shapes of
tensors alone and nothing is read back, so a CUDA graph of them serves any lengths.
"""

from torch import Tensor

from disagg.kernels.formats import QuantFormat
from disagg.kernels.formats_paged import as_paged
from disagg.kernels.paged_pieces import attend_paged
from disagg.kernels.parts import UnitPartials
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
) -> UnitPartials:
    """Attention over quantised pages, on the codes. Shapes as in reference.attend_quantized.

    spelling: how codes are read, of bits.py; None: as the chip takes them
    error: about 5e-4 relative (q times scale-of-K and p times scale-of-V are rounded to fp16)
    """
    return attend_paged(
        q, arena, pages, lo, hi, as_paged(fmt), base, heads, scale,
        spelling=spelling or spelling_for(q.device),
    )  # fmt: skip
