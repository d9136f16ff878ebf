"""Which pages a batch really sees, as one list: what attention on a CPU walks, tile by tile.

Sequences of a batch have different lengths. Pages are not padded to the longest one: those that
some query sees stand in one list, with the sequence that each belongs to. The softmax then runs
over the pages of a sequence, wherever they stand in the list.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.cpu_codes import weights_of
from disagg.kernels.formats_paged import Side
from disagg.kernels.reference_pieces import ArenaBlocks, read_scales, read_sparse

# a weight this small adds nothing to a sum of 1, but subnormal products cost a CPU five times more
NOTHING = 1e-26


@dataclass(frozen=True)
class Seen:
    """F pages of B sequences.

    ids:     [F] i32 - page ids
    rows:    [F] i64 - the sequence of each; columns: [F] i64 - which of its pages it is
    partial: [X] i64 - the pages of which some query does not see some token
    hidden:  [X, M, tokens] bool - where that is so
    """

    ids: Tensor
    rows: Tensor
    columns: Tensor
    partial: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Pages:
    """F pages as they are read, with the segments that they share.

    blocks: [F, 1]; shared: the segments of all sequences, [B * S, 1]; None: there are none
    owners: [F] i64 - the segment of each page
    """

    blocks: ArenaBlocks
    shared: ArenaBlocks | None
    owners: Tensor

    def scales(self, side: Side) -> tuple[Tensor, Tensor]:
        """Scales and zeros: [F, H, *side.scale_shape] fp32, a single one for each column."""
        if side.scale.shared and self.shared is not None:
            found = read_scales(self.shared, side, torch.float32)
            scales, zeros = (x.squeeze(2).index_select(0, self.owners) for x in found)
        else:
            found = read_scales(self.blocks, side, torch.float32)
            scales, zeros = (x.squeeze(2) for x in found)
        if side.scale.by == "block":
            scales, zeros = (x.expand(-1, -1, 1, side.columns) for x in (scales, zeros))
        return scales, zeros

    def outliers(self, side: Side, scales: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows (i64) and what is added to codes there: [F, H, slots, columns]."""
        if side.sparse is None:
            return None
        rows, delta = (x.squeeze(2).mT for x in read_sparse(self.blocks, side, torch.float32))
        if scales.shape[2] > 1:
            scales = scales.gather(2, rows // side.scale.group)
        return rows, delta / (scales * weights_of(side)[rows])


def see_pages(pages: Tensor, lo: Tensor, hi: Tensor, tokens: int) -> Seen:
    """The pages [B, P] of which some query (b, m) sees a token lo <= t < hi, both [B, M]."""
    sees = hi > lo
    start = lo.masked_fill(~sees, pages.shape[1] * tokens).amin(1, keepdim=True)
    end = hi.masked_fill(~sees, 0).amax(1, keepdim=True)
    first = torch.arange(0, pages.shape[1] * tokens, tokens)
    rows, columns = ((first < end) & (first + tokens > start)).nonzero(as_tuple=True)
    first, lo, hi = first[columns].unsqueeze(1), lo[rows], hi[rows]
    partial = ((lo > first) | (hi < first + tokens)).any(1).nonzero()[:, 0]
    token = (first[partial] + torch.arange(tokens)).unsqueeze(1)  # [X, 1, tokens]
    hidden = (token < lo[partial].unsqueeze(2)) | (token >= hi[partial].unsqueeze(2))
    return Seen(pages[rows, columns], rows, columns, partial, hidden)


def hide_unseen(scores: Tensor, seen: Seen) -> None:
    """Give -inf to tokens that a query does not see.

    scores: [F, H, M * G, groups, tokens / groups]
    """
    if len(seen.partial):
        some = scores.index_select(0, seen.partial).flatten(3)
        by_query = some.unflatten(2, (seen.hidden.shape[1], -1))
        by_query.masked_fill_(seen.hidden[:, None, :, None], -torch.inf)
        scores.index_copy_(0, seen.partial, some.view(-1, *scores.shape[1:]))


def softmax_by_row(
    scores: Tensor, bias: Tensor | None, rows: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax over all pages of a sequence, before it is divided by its sum.

    scores:  [F, H, N, groups, tokens / groups], overwritten; bias: [F, H, N, groups], added to them
    returns: weights [F, H, N, tokens], their sums [B, H, N], lse [B, H, N]
    """
    shape = (batch, *scores.shape[1:3])
    best = scores.amax(4) if bias is None else scores.amax(4).add_(bias)
    index = rows.view(-1, 1, 1).expand(scores.shape[:3])
    top = scores.new_full(shape, -torch.inf).scatter_reduce_(0, index, best.amax(3), "amax")
    top.masked_fill_(top == -torch.inf, 0.0)
    down = top.index_select(0, rows).unsqueeze(3)
    down = down if bias is None else down - bias
    weights = scores.sub_(down.unsqueeze(4)).exp_().flatten(3)
    torch.threshold_(weights, NOTHING, 0.0)
    total = scores.new_zeros(shape).index_add_(0, rows, weights.sum(3))
    return weights, total, total.log().add_(top)
