"""Attention over raw pages, fast on a CPU: as `reference.attend_raw`, which is its spec.

Sequences that show about as many pages are computed together, others apart: nothing is padded by
more than a third. Their K, and later their V, is read in tiles that stay in a second-level cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from disagg.kernels.cpu_codes import TILE_ELEMENTS
from disagg.kernels.cpu_paged import queries_of_rows, rows_of_queries
from disagg.kernels.cpu_pages import NOTHING
from disagg.kernels.formats import RawFormat
from disagg.kernels.reference import Partial
from disagg.kernels.reference_pages import plane_view

TILE_PAGES = 16  # of a sequence, at least; fewer make small matrices
LEAST_FULL = 0.75  # the pages of a sequence, of those of the longest that it is computed with


@torch.no_grad()
def attend_raw(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: RawFormat,
    base: int,
    heads: int,
    scale: float,
) -> Partial:
    """Attention over raw pages. Arguments and results as in `reference.attend_raw`; q is fp32."""
    batch, m = q.shape[:2]
    x = rows_of_queries(q * scale, heads)
    o, lse = torch.zeros_like(x), x.new_full(x.shape[:3], -torch.inf)
    seen = hi > lo
    starts = lo.masked_fill(~seen, pages.shape[1] * fmt.tokens).amin(1) // fmt.tokens
    counts = -(-hi.masked_fill(~seen, 0).amax(1) // fmt.tokens) - starts
    page_elements = heads * fmt.tokens * fmt.head_dim
    most = max(1, TILE_ELEMENTS // (TILE_PAGES * page_elements))
    shape, dtype = (fmt.tokens, fmt.head_dim), getattr(torch, fmt.dtype)
    k, v = (
        plane_view(arena, dtype, base + offset, heads, fmt.block_bytes, shape)
        for offset in (fmt.k, fmt.v)
    )
    for rows, count in _groups(counts.tolist(), most):
        some = slice(None) if len(rows) == batch else torch.tensor(rows)
        start = starts[some].unsqueeze(1)
        columns = (start + torch.arange(count)).clamp_max_(pages.shape[1] - 1)
        ids = pages[some].gather(1, columns.long())
        place = (start * fmt.tokens + torch.arange(count * fmt.tokens)).unsqueeze(1)
        hidden = (place < lo[some].unsqueeze(2)) | (place >= hi[some].unsqueeze(2))
        o[some], lse[some] = _attend(x[some], k, v, ids, hidden)
    return queries_of_rows(o, m), queries_of_rows(lse.unsqueeze(3), m).squeeze(3)


def _groups(counts: list[int], most: int) -> Iterator[tuple[list[int], int]]:
    """Rows to be computed together, at most so many, and the largest of their counts."""
    left = sorted((row for row, count in enumerate(counts) if count > 0), key=lambda i: -counts[i])
    while left:
        longest = counts[left[0]]
        together = [row for row in left[:most] if counts[row] >= LEAST_FULL * longest]
        left = left[len(together) :]
        yield sorted(together), longest


def _attend(x: Tensor, k: Tensor, v: Tensor, ids: Tensor, hidden: Tensor) -> Partial:
    """Sequences over pages ids [b, P]: x [b, H, N, D] -> o [b, H, N, D], lse [b, H, N].

    k, v:   [page ids, H, tokens, D]
    hidden: [b, M, P * tokens]
    """
    batch, heads, n, _ = x.shape
    tokens = k.shape[2]
    rows = x.transpose(0, 1).flatten(0, 1)  # [H * b, N, D]
    scores = x.new_empty(len(rows), n, ids.shape[1] * tokens)
    for part, tile in _tiles(k, ids):
        scores[:, :, part] = rows @ tile.mT
    if hidden.any():
        by_query = scores.view(heads, batch, hidden.shape[1], -1, scores.shape[2])
        by_query.masked_fill_(hidden.unsqueeze(2), -torch.inf)
    top = scores.amax(2, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0.0)
    weights = torch.threshold_(scores.sub_(top).exp_(), NOTHING, 0.0)
    total = weights.sum(2, keepdim=True)
    o = torch.zeros_like(rows)
    for part, tile in _tiles(v, ids):
        o.baddbmm_(weights[:, :, part], tile)
    o.div_(total.clamp_min(1.0))
    lse = total.log().add_(top).squeeze(2)
    return o.unflatten(0, (heads, batch)).transpose(0, 1), lse.view(heads, batch, n).transpose(0, 1)


def _tiles(plane: Tensor, ids: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Tokens of sequences and K or V there: [H * b, tokens, D] fp32."""
    batch, count = ids.shape
    _, heads, tokens, head_dim = plane.shape
    step = max(1, TILE_ELEMENTS // (batch * heads * tokens * head_dim))
    room = torch.empty(heads, batch * min(step, count), tokens, head_dim)
    for first in range(0, count, step):
        some = ids[:, first : first + step]
        tile = room[:, : some.numel()] if some.numel() < room.shape[1] else room
        tile.transpose(0, 1).copy_(plane.index_select(0, some.flatten()))
        part = slice(first * tokens, (first + some.shape[1]) * tokens)
        yield part, tile.reshape(heads * batch, -1, head_dim)
