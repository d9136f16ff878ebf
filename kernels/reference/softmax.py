"""Shared by all attention in plain torch: query columns, visible tokens, the softmax.

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
    outputs = [o for o, _ in partials]
    lses = [lse for _, lse in partials]
    if sinks is not None:
        sink_lse = sinks.to(lses[0].dtype)
        outputs.append(torch.zeros_like(outputs[0]))
        lses.append(sink_lse.expand_as(lses[0]))
    o = torch.stack(outputs)  # [N, B, M, Hq, D]
    lse = torch.stack(lses)  # [N, B, M, Hq]
    weights = _exp_or_zero(lse, lse.amax(0))
    # the largest weight is 1; all are 0 for a query that sees nothing
    total = weights.sum(0).clamp_min(1.0)
    weighted = (o * weights.unsqueeze(-1)).sum(0)
    return weighted / total.unsqueeze(-1)


def columns_of(q: Tensor, heads: int) -> Tensor:
    """[B, M, Hq, D] -> [B, heads, D, M * G]: the queries that read a KV head, side by side."""
    batch, m, _, head_dim = q.shape
    grouped = q.view(batch, m, heads, -1, head_dim)  # [B, M, H, G, D]
    columns = grouped.permute(0, 2, 4, 1, 3)  # [B, H, D, M, G]
    return columns.reshape(batch, heads, head_dim, -1)


def rows_of(x: Tensor, m: int) -> Tensor:
    """[B, heads, D, M * G] -> [B, M, Hq, D]: the inverse of `columns_of`."""
    batch, heads, head_dim, _ = x.shape
    grouped = x.view(batch, heads, head_dim, m, -1)  # [B, H, D, M, G]
    rows = grouped.permute(0, 3, 1, 4, 2)  # [B, M, H, G, D]
    return rows.flatten(2, 3).contiguous()


def partial_of(
    o: Tensor,
    lse: Tensor,
    m: int,
) -> Partial:
    """o [B, heads, D, M * G] and lse [B, heads, M * G] as a partial result."""
    lse_rows = rows_of(lse.unsqueeze(2), m)
    return rows_of(o, m), lse_rows.squeeze(3)


def visible_pages(view: View, tokens: int) -> tuple[int, int]:
    """The range of page columns that some query sees; at least one page."""
    sees_any = view.hi > view.lo
    if not sees_any.any():
        return 0, 1
    first_token = int(view.lo[sees_any].min())
    end_token = int(view.hi[sees_any].max())
    return first_token // tokens, -(-end_token // tokens)


def page_chunks(pages: Tensor, page_elements: int) -> list[slice]:
    """Page columns, about CHUNK_ELEMENTS codes at a time."""
    batch, count = pages.shape
    step = max(1, CHUNK_ELEMENTS // (batch * page_elements))
    return [slice(start, start + step) for start in range(0, count, step)]


def visible_tokens(
    view: View,
    first: int,
    count: int,
) -> Tensor:
    """Whether each query sees tokens first .. first + count - 1: [B, 1, count, M] bool."""
    positions = torch.arange(first, first + count, device=view.lo.device)
    return visible_at(view, positions[None, None])


def visible_at(view: View, positions: Tensor) -> Tensor:
    """Whether each query sees the token at a position.

    positions: [B or 1, H or 1, n]
    returns:   [B, H or 1, n, M] bool
    """
    lo = view.lo[:, None, None]  # [B, 1, 1, M]
    hi = view.hi[:, None, None]
    positions = positions.unsqueeze(3)
    return (positions >= lo) & (positions < hi)


def capped(scores: Tensor, cap: float) -> Tensor:
    """Scores under the cap of a `Softmax`."""
    if not cap:
        return scores
    return cap * (scores / cap).tanh()


def masked_softmax(
    scores: Tensor,
    visible: Tensor,
    cap: float,
) -> Partial:
    """Weights of the shape of the scores, and lse [B, heads, M * G].

    scores:  [B, heads, n, M * G]
    visible: [B, heads or 1, n, M] bool
    cap:     as in `Softmax`
    """
    scores = capped(scores, cap)
    if not visible.all():
        group = scores.shape[3] // visible.shape[3]
        hidden = ~visible.repeat_interleave(group, 3)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(2)
    return _exp_or_zero(scores, lse.unsqueeze(2)), lse


def _exp_or_zero(x: Tensor, top: Tensor) -> Tensor:
    """exp(x - top), and 0 where both are -inf."""
    finite_top = top.masked_fill(top == -torch.inf, 0.0)
    return (x - finite_top).exp_()
