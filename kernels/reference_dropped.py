"""Keeping some tokens and dropping the rest, in plain torch: who stays, and attention on them.

A page holds fewer tokens than it covers. Each KV head chooses for itself, so slot s of two heads
hold different tokens; positions say which.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.reference import Partial, columns_of, rows_of
from disagg.kernels.reference_pieces import ArenaBlocks


@dataclass(frozen=True)
class DroppedFormat:
    """`slots` tokens in a block that covers `tokens`; offsets.

    k, v: float16 [slots][D] · positions: int32 [slots][1], counted from the sequence's first token;
    None: slot s of page column p holds token p * tokens + s of the table
    """

    tokens: int
    slots: int
    head_dim: int
    block_bytes: int
    k: int
    v: int
    positions: int | None


def attend_dropped(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: DroppedFormat,
    base: int,
    heads: int,
    scale: float,
) -> Partial:
    """Attention over what was kept. Arguments and results as in `reference.attend_raw`.

    lo, hi: query (b, m) sees kept tokens at lo <= position < hi
    """
    blocks = ArenaBlocks(arena, pages, base, heads, fmt.block_bytes)
    shape = (fmt.slots, fmt.head_dim)
    k, v = (blocks.plane(torch.float16, offset, shape).flatten(2, 3) for offset in (fmt.k, fmt.v))
    if fmt.positions is None:
        place = torch.arange(pages.shape[1] * fmt.tokens, device=q.device).expand(k.shape[:3])
    else:
        place = blocks.plane(torch.int32, fmt.positions, (fmt.slots, 1)).flatten(2)
    seen = (place.unsqueeze(3) >= lo[:, None, None]) & (place.unsqueeze(3) < hi[:, None, None])
    # a short row is padded with pages that it shows elsewhere, behind the tokens it covers
    first = torch.arange(pages.shape[1], device=q.device).repeat_interleave(fmt.slots) * fmt.tokens
    seen &= first.unsqueeze(1) < hi[:, None, None]
    columns = columns_of(q * scale, heads)
    hidden = ~seen.repeat_interleave(columns.shape[3] // lo.shape[1], 3)
    scores = (k.to(q.dtype) @ columns).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(2)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(2)).exp()
    o = v.to(q.dtype).transpose(2, 3) @ p
    m = q.shape[1]
    return rows_of(o, m), rows_of(lse.unsqueeze(2), m).squeeze(3)


def weights_received(q: Tensor, k: Tensor, scale: float, total: int) -> Tensor:
    """How much attention each of the first n tokens gets from the last W of `total`: [H, n] fp32.

    q: [Hq, W, D] - queries of tokens total - W .. total - 1; k: [H, n, D]. The softmax is over
    these n tokens, which only scales what a query gives them
    """
    heads, n, head_dim = k.shape
    width, last = q.shape[0] // heads, q.shape[1]
    rows = q.float().reshape(heads, width * last, head_dim) * scale
    scores = rows @ k.float().transpose(1, 2)  # [H, width * W, n]
    own = torch.arange(total - last, total, device=k.device).repeat(width)
    future = torch.arange(n, device=k.device) > own[:, None]
    return scores.masked_fill(future, -torch.inf).softmax(-1).sum(1)


def heaviest_and_recent(weights: Tensor, count: int, recent: int) -> Tensor:
    """Positions of the `recent` last tokens and of the heaviest others: [H, count] i64, ascending.

    weights: [H, n]; of equals the earlier one stays
    """
    n = weights.shape[1]
    old = weights[:, : n - recent]
    chosen = old.sort(dim=1, descending=True, stable=True).indices[:, : count - recent]
    last = torch.arange(n - recent, n, device=weights.device).expand(weights.shape[0], -1)
    return torch.cat([chosen, last], 1).sort(dim=1).values
