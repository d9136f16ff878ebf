"""What every attention in plain torch shares: query columns, which tokens are seen, the softmax.

The arithmetic runs in the dtype of q, so that fp64 shows the algebra to be exact.
"""

import torch
from torch import Tensor

from disagg.kernels.view import Partial, View

# elements of codes unpacked at once: as floats they stay in a core's second-level cache
CHUNK_ELEMENTS = 1 << 19


def merge(partials: list[Partial], sinks: Tensor | None = None) -> Tensor:
    """Attention over the union of disjoint token sets, from attention over each: [B, M, Hq, D].

    sinks: as in `Softmax`
    """
    if sinks is not None:
        o, lse = partials[0]
        partials = [
            *partials,
            (torch.zeros_like(o), sinks.to(lse.dtype).expand_as(lse)),
        ]
    lse = torch.stack([one[1] for one in partials])
    weights = _exp_or_zero(lse, lse.amax(0))
    total = weights.sum(0).clamp_min(
        1.0
    )  # the largest term is 1; all zero where nothing is seen
    o = torch.stack([one[0] for one in partials])
    return (o * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1)


def columns_of(q: Tensor, heads: int) -> Tensor:
    """[B, M, Hq, D] -> [B, heads, D, M * G]: the queries that read a KV head, side by side."""
    batch, m, _, head_dim = q.shape
    grouped = q.view(batch, m, heads, -1, head_dim).permute(0, 2, 4, 1, 3)
    return grouped.reshape(batch, heads, head_dim, -1)


def rows_of(x: Tensor, m: int) -> Tensor:
    """[B, heads, D, M * G] -> [B, M, Hq, D]: the inverse of `columns_of`."""
    batch, heads, head_dim, _ = x.shape
    return (
        x.view(batch, heads, head_dim, m, -1)
        .permute(0, 3, 1, 4, 2)
        .flatten(2, 3)
        .contiguous()
    )


def partial_of(o: Tensor, lse: Tensor, m: int) -> Partial:
    """o [B, heads, D, M * G] and lse [B, heads, M * G] as a partial result."""
    return rows_of(o, m), rows_of(lse.unsqueeze(2), m).squeeze(3)


def visible_pages(view: View, tokens: int) -> tuple[int, int]:
    """The range of page columns that some query sees; at least one page."""
    sees = view.hi > view.lo
    if not sees.any():
        return 0, 1
    first = int(view.lo[sees].min()) // tokens
    return first, -(-int(view.hi[sees].max()) // tokens)


def page_chunks(pages: Tensor, page_elements: int) -> list[slice]:
    """Page columns, about CHUNK_ELEMENTS codes at a time."""
    batch, count = pages.shape
    step = max(1, CHUNK_ELEMENTS // (batch * page_elements))
    return [slice(start, start + step) for start in range(0, count, step)]


def seen_tokens(view: View, first: int, count: int) -> Tensor:
    """Whether each query sees tokens first .. first + count - 1: [B, 1, count, M] bool."""
    position = torch.arange(first, first + count, device=view.lo.device)
    return seen_at(view, position[None, None])


def seen_at(view: View, position: Tensor) -> Tensor:
    """Whether each query sees tokens at positions [B or 1, H or 1, n]: [B, H or 1, n, M] bool."""
    place = position.unsqueeze(3)
    return (place >= view.lo[:, None, None]) & (place < view.hi[:, None, None])


def capped(scores: Tensor, cap: float) -> Tensor:
    """Scores under the cap of a `Softmax`."""
    return cap * (scores / cap).tanh() if cap else scores


def masked_softmax(scores: Tensor, seen: Tensor, cap: float) -> Partial:
    """Weights of the same shape, and lse [B, heads, M * G].

    scores: [B, heads, n, M * G]; seen: [B, heads or 1, n, M] bool; cap: as in `Softmax`
    """
    scores = capped(scores, cap)
    if not seen.all():
        hidden = ~seen.repeat_interleave(scores.shape[3] // seen.shape[3], 3)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(2)
    return _exp_or_zero(scores, lse.unsqueeze(2)), lse


def _exp_or_zero(x: Tensor, top: Tensor) -> Tensor:
    """exp(x - top), and 0 where both are -inf."""
    return (x - top.masked_fill(top == -torch.inf, 0.0)).exp_()
