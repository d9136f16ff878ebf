"""A part of attention: what the tokens of one page table add to the answer of each query.

    pages                attend_quantized ── part ──┐
    kept exact           attend_kept ─────── part ──┼── merge ── o [B, M, Hq, D]
    tail                 attend_raw ──────── part ──┘

Every `attend_*` gives a part, over tokens that are in no other part; `ops.merge` makes the answer
of all of them. What a part holds is between these two. On a CPU it is a table that waits: `merge`
attends to all of them in one call; or one (o, log-sum-exp) of the torch reference. On a GPU, where
attention is cut into units of work, it is one (o, log-sum-exp) for each unit, so that a single
launch reduces the units of all parts: an answer of three parts takes four launches.
"""

from dataclasses import dataclass

from torch import Tensor

from disagg.kernels.cpu.attend import Waiting
from disagg.kernels.reference import Partial


@dataclass(frozen=True)
class UnitPartials:
    """What the units of work found, each over tokens of its own.

    o:       [slots, M * Hq, D] fp32; lse: [slots, M * Hq] fp32, log2 of the sum of exponentials
    queries: (B, M, Hq)
    spans:   [B * runs] int32, twice: units.py finds the units of each sequence from them, as the
             kernel did that wrote o and lse; the first is None where spans begin at 0, both are
             where slot b is all of sequence b
    runs:    of each sequence, cut one by one; tile: tokens that no cut divides
    """

    o: Tensor
    lse: Tensor
    queries: tuple[int, int, int]
    spans: tuple[Tensor | None, Tensor | None] = (None, None)
    runs: int = 1
    tile: int = 1


UnitPart = Partial | UnitPartials  # of tensors on one GPU
Part = UnitPart | Waiting
