"""A view: the pages of one layout as queries see them in one layer. Every attention reads views.

    pages                view ── partial result ──┐
    kept exact           view ── partial result ──┼── merge ── o [B, M, Hq, D]
    tail                 view ── partial result ──┘

A tail is all of a sequence's raw pages. Where the first tokens stay exact in front of the pages
(sinks), they are its first slots, and the tokens behind the pages follow at once.

A codec says which views its sequences have, over disjoint tokens; `ops.attend` attends to all of
them. How is up to the backend: the reference computes one (o, log-sum-exp) of each view, the C
library computes all in one call, and a GPU cuts them into units of work for one launch.
"""

from dataclasses import dataclass

from torch import Tensor

from disagg.kernels.formats import Format

Partial = tuple[Tensor, Tensor]  # o [B, M, Hq, D] and lse [B, M, Hq], the natural log


@dataclass(frozen=True)
class Softmax:
    """How products of a query and keys become weights.

    scale: a score is scale * q.k
    cap:   unless 0, a score s counts as cap * tanh(s / cap)
    sinks: [Hq] of any float dtype - one more score for each query head: it takes weight and has no
           value, so it is one more partial result; None: there is none
    """

    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True)
class WorkPlan:
    """How attention over views is cut into units of work, one for each program of a GPU.

    table:  [U, 5] int32 - number of the view, sequence, first and end tile, page id of the segment;
            units of a sequence are adjacent; a unit without work begins and ends at 0
    starts: [B + 1] int32 - the first unit of each sequence
    """

    table: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Table:
    """Pages of one format of B sequences, and the tokens that each of M queries sees of them.

    pages:    [B, P] int32 - page ids in token order, short rows padded with pages they do not see
    lo, hi:   [B, M] int32 - query (b, m) sees tokens lo <= t < hi, counted from pages[b, 0]; where
              slots have positions, from the sequence's first token
    segments: [B, S] int32 - page ids of the segments of each sequence, in order; None: no segments
    owner:    [B, P] int32 - which of the segments each page belongs to
    sides:    [B] int32 - page ids of side records, where the format has one
    """

    pages: Tensor
    lo: Tensor
    hi: Tensor
    fmt: Format
    segments: Tensor | None = None
    owner: Tensor | None = None
    sides: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class View(Table):
    """A table in one layer.

    arena:        [bytes] u8 - what page ids address
    base:         byte offset of this layer's layer page inside a page
    heads:        KV heads
    segment_base: as base, in a segment
    side_base:    as base, in a side record
    """

    arena: Tensor
    base: int
    heads: int
    segment_base: int = 0
    side_base: int = 0
