"""A view: the pages of one layout as queries see them in one layer; what every attention reads.

    pages                view ── partial result ──┐
    kept exact           view ── partial result ──┼── merge ── o [B, M, Hq, D]
    tail                 view ── partial result ──┘

A tail is all of a sequence's raw pages: where the first tokens stay exact in front of the pages
(a sink), they are its first slots, and the tokens behind the pages follow at once.

A codec says which views its sequences have, over disjoint tokens; `ops.attend` makes one answer of
all of them. What happens between is the business of whoever computes: the reference makes one
(o, log-sum-exp) of each view, the C library answers all in one call, a GPU cuts all of them into
units of work, which one launch takes.
"""

from dataclasses import dataclass

from torch import Tensor

from disagg.kernels.formats import Format

Partial = tuple[Tensor, Tensor]  # o [B, M, Hq, D] and lse [B, M, Hq], the natural log


@dataclass(frozen=True)
class Softmax:
    """How products of a query and keys become weights.

    scale: multiplies q.k, which makes a score
    cap:   where it is not 0, a score s counts as cap * tanh(s / cap)
    sinks: [Hq] of any float dtype - a score that each query head has besides those of tokens: it
           takes weight and has no value, so it is one more partial result; None: there is none
    """

    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True)
class WorkPlan:
    """How attention over views is cut into units of work, one for each program of a GPU.

    table:  [U, 5] int32 - number of the view, sequence, first and end tile, page id of the segment;
            units of a sequence lie side by side, a unit without work begins and ends at 0
    starts: [B + 1] int32 - where the units of each sequence begin
    """

    table: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Table:
    """Pages of one format of B sequences, and the tokens that each of M queries sees of them.

    pages:    [B, P] int32 - page ids in token order, short rows padded with pages they do not see
    lo, hi:   [B, M] int32 - query (b, m) sees tokens lo <= t < hi, counted from pages[b, 0]; where
              slots have positions, from the sequence's first token
    segments: [B, S] int32 - page ids of the segments of each sequence, in order; owner: [B, P]
              int32 - which of them each page belongs to. None: no segments
    sides:    [B] int32 - side records, where the format has one
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

    arena: [bytes] u8 - what page ids address
    base:  byte offset of this layer's layer page inside a page; segment_base, side_base: as base,
           in a segment and a side record
    heads: KV heads
    """

    arena: Tensor
    base: int
    heads: int
    segment_base: int = 0
    side_base: int = 0
