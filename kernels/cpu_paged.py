"""Attention on pages made of pieces, fast on a CPU: as reference_paged.py, which is its spec.

The same sums in another order, with fewer passes over the codes and none over K or V. The pages of
all sequences stand in one list; queries and weights are rows [N, columns], so that codes are
multiplied as they lie. The arithmetic is fp32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.cpu_pages import Pages, hide_unseen, see_pages, softmax_by_row
from disagg.kernels.cpu_scores import score_pages
from disagg.kernels.cpu_values import sum_pages
from disagg.kernels.formats_paged import PagedFormat, Side
from disagg.kernels.reference import Partial
from disagg.kernels.reference_pieces import ArenaBlocks, read_factor, read_valid


@torch.no_grad()
def attend_paged(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: PagedFormat,
    base: int,
    heads: int,
    scale: float,
    segments: Tensor | None = None,
    owner: Tensor | None = None,
    segment_base: int = 0,
) -> Partial:
    """Attention over pages of one layout. Arguments and results as in `reference_paged`.

    q:     [B, M, Hq, D] fp32
    error: at most 1e-5 relative, against exact attention on what `decode_paged` makes of the pages
    """
    batch, m = q.shape[:2]
    seen = see_pages(pages, lo, hi, fmt.tokens)
    if not len(seen.ids):
        return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    blocks = ArenaBlocks(arena, seen.ids.unsqueeze(1), base, heads, fmt.block_bytes)
    if segments is None or owner is None:
        found, count = Pages(blocks, None, seen.rows), batch
    else:
        ids = segments.flatten().unsqueeze(1)
        shared = ArenaBlocks(arena, ids, segment_base, heads, fmt.segment_bytes)
        owners = seen.rows * segments.shape[1] + owner[seen.rows, seen.columns]
        found, count = Pages(blocks, shared, owners), batch * segments.shape[1]
    work = Work(found, seen.rows, count, fmt)
    scores, bias = work.scores(rows_of_queries(q * scale, heads))
    hide_unseen(scores, seen)
    if fmt.valid is not None:
        there = read_valid(blocks, fmt.valid, fmt.tokens).unsqueeze(3)  # [F, H, 1, 1, tokens]
        scores.masked_fill_(~there.view(*there.shape[:3], *scores.shape[3:]), -torch.inf)
    weights, total, lse = softmax_by_row(scores, bias, seen.rows, batch)
    o = work.output(weights, batch).div_(total.clamp_min_(1.0).unsqueeze(3))
    return queries_of_rows(o, m), queries_of_rows(lse.unsqueeze(3), m).squeeze(3)


def is_supported(fmt: PagedFormat, device: torch.device) -> bool:
    """Whether `attend_paged` here knows the format: no codec's values have scales by row."""
    return device.type == "cpu" and fmt.v.scale.by != "row"


def rows_of_queries(q: Tensor, heads: int) -> Tensor:
    """[B, M, Hq, D] -> [B, heads, M * G, D]: the queries that read a KV head, one below another."""
    return q.unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)


def queries_of_rows(x: Tensor, m: int) -> Tensor:
    """[B, heads, M * G, D] -> [B, M, Hq, D]: the inverse of `rows_of_queries`."""
    return x.unflatten(2, (m, -1)).transpose(1, 2).flatten(2, 3)


@dataclass(frozen=True)
class Work:
    """Both products with F pages, and what segments have to do with them.

    rows:  [F] i64 - the sequence of each page
    count: of the segments of all sequences, B * S; of sequences where there are none
    """

    pages: Pages
    rows: Tensor
    count: int
    fmt: PagedFormat

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries x [B, H, N, D] -> what `score_pages` gives."""
        side, owners = self.fmt.k, self.pages.owners
        every = x.repeat_interleave(self.count // len(x), 0) if self._mixes(side) else x
        if side.rotation:
            queries = self._rotate(every, side, back=False).index_select(0, owners)
        else:
            queries = x.index_select(0, self.rows)
        scores, bias = score_pages(self.pages, side, queries)
        if side.low_rank:
            low = (every @ self._basis(side)).index_select(0, owners)
            scores += (low @ self._factor(side).mT).view(scores.shape)
        return scores, bias

    def output(self, weights: Tensor, batch: int) -> Tensor:
        """Weights [F, H, N, tokens] -> weighted sums of values [B, H, N, D]."""
        side, owners = self.fmt.v, self.pages.owners
        if not side.rotation:
            sums = sum_pages(self.pages, side, weights, self.rows, batch)
        else:
            sums = sum_pages(self.pages, side, weights, owners, self.count)
            sums = self._rotate(sums, side, back=True).unflatten(0, (batch, -1)).sum(1)
        if side.low_rank:
            part = weights @ self._factor(side)  # [F, H, N, rank]
            low = part.new_zeros(self.count, *part.shape[1:]).index_add_(0, owners, part)
            sums += (low @ self._basis(side).mT).unflatten(0, (batch, -1)).sum(1)
        return sums

    def _mixes(self, side: Side) -> bool:
        """Whether queries meet a matrix of each segment."""
        return side.rotation is not None or side.low_rank is not None

    def _factor(self, side: Side) -> Tensor:
        """A of every page: [F, H, tokens, rank]."""
        assert side.low_rank is not None
        piece, blocks = side.low_rank, self.pages.blocks
        return read_factor(blocks, piece.a, self.fmt.tokens, piece.rank, torch.float32).squeeze(2)

    def _basis(self, side: Side) -> Tensor:
        """B of every segment: [B * S, H, D, rank]."""
        assert side.low_rank is not None
        assert self.pages.shared is not None
        piece, blocks = side.low_rank, self.pages.shared
        return read_factor(blocks, piece.b, self.fmt.head_dim, piece.rank, torch.float32).squeeze(2)

    def _rotate(self, x: Tensor, side: Side, back: bool) -> Tensor:
        """x [B * S, H, N, D] times T_S of its segment, or back: block by block of channels."""
        assert side.rotation is not None
        assert self.pages.shared is not None
        block = side.rotation.block
        found = self.pages.shared.plane(torch.float16, side.rotation.matrix, (block, block)).float()
        matrix = found if back else found.mT  # x is a row, so T_S x is x T_S^T
        return (x.unflatten(3, (-1, block)) @ matrix).flatten(3)
