"""Tokens that a KV head keeps exact because quantising would ruin their group; plain torch.

Each head chooses for itself, so slot s of head 0 and of head 1 hold different tokens. Their K and V
lie in raw pages; a side record says per slot which position it holds, its score and its state:

    FREE     nothing here yet
    POOL     one of the best so far; a better token may take its place in the pool
    RETIRED  no longer one of the best, still kept: its place among the codes is gone

Slots are only ever appended; a change of state is a flag.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats import RawFormat
from disagg.kernels.reference import Partial, columns_of, rows_of
from disagg.kernels.reference_pages import gather_raw
from disagg.kernels.reference_pieces import ArenaBlocks, DenseBlocks

FREE, POOL, RETIRED = 0, 1, 2


@dataclass(frozen=True)
class KeptFormat:
    """Offsets in a block of the side record, each plane of `slots` items.

    positions: int32 · scores: float32 · states: uint8
    """

    slots: int
    block_bytes: int
    positions: int
    scores: int
    states: int


@dataclass
class Kept:
    """The slots of every head, as views that can be written to.

    positions, scores, states: [H, slots]; k, v: [H, room, D] - room for slots, in raw pages
    """

    positions: Tensor
    scores: Tensor
    states: Tensor
    k: Tensor
    v: Tensor


def view_kept(side: Tensor, blocks: Tensor, fmt: KeptFormat, raw: RawFormat) -> Kept:
    """Views of a side record [H, side bytes] u8; copies of raw pages [K, H, raw bytes] u8."""
    planes = DenseBlocks(side)
    dtype = getattr(torch, raw.dtype)
    tokens = blocks.view(dtype).unflatten(-1, (2, raw.tokens, raw.head_dim))
    k, v = tokens.permute(2, 1, 0, 3, 4).flatten(2, 3)
    return Kept(
        planes.plane(torch.int32, fmt.positions, (1, fmt.slots)).squeeze(-2),
        planes.plane(torch.float32, fmt.scores, (1, fmt.slots)).squeeze(-2),
        planes.plane(torch.uint8, fmt.states, (1, fmt.slots)).squeeze(-2),
        k,
        v,
    )


def raw_of(kept: Kept, raw: RawFormat) -> Tensor:
    """The raw pages [K, H, raw bytes] u8 that hold the slots' k and v."""
    both = torch.stack([kept.k, kept.v]).unflatten(2, (-1, raw.tokens))  # [2, H, K, 16, D]
    return both.permute(2, 1, 0, 3, 4).flatten(2).contiguous().view(torch.uint8)


def keep_outliers(kept: Kept, k: Tensor, v: Tensor, count: int, first: int) -> Tensor:
    """Let tokens first .. first+n-1 compete by |K|_1 and keep the winners.

    k, v:    [H, n, D] of the raw dtype; count: of tokens in a head's pool
    returns: [H, n] bool - the winners; `kept` holds them
    """
    scores = k.float().abs().sum(2)
    won = compete(kept, scores, count)
    keep(kept, won, scores, k, v, first)
    return won


def compete(kept: Kept, scores: Tensor, count: int) -> Tensor:
    """Let new tokens compete with the pool: the `count` lowest scores of a head are its pool.

    scores:  [H, n] fp32 - of the new tokens; of equals the earlier wins
    returns: [H, n] bool - the new tokens that won; the states of those they beat are changed. A
             head with too few free slots for its winners stays as it is
    """
    heads, n = scores.shape
    slots = kept.states.shape[1]
    pool = kept.states == POOL
    ranked = torch.cat([kept.scores.masked_fill(~pool, torch.inf), scores], 1)
    best = torch.zeros(heads, slots + n, dtype=torch.bool, device=scores.device)
    best.scatter_(1, ranked.sort(dim=1, stable=True).indices[:, :count], True)
    won = best[:, slots:]
    room = (kept.states == FREE).sum(1)
    fits = (won.sum(1) <= room).unsqueeze(1)
    beaten = pool & ~best[:, :slots] & fits
    kept.states.masked_fill_(beaten, RETIRED)
    return won & fits


def keep(kept: Kept, won: Tensor, scores: Tensor, k: Tensor, v: Tensor, first: int) -> None:
    """Put the winners among tokens first .. first+n-1 into free slots, in order of position.

    won, scores: [H, n]; k, v: [H, n, D] of the raw dtype
    """
    used = (kept.states != FREE).sum(1, keepdim=True)
    slots = used + won.long().cumsum(1) - 1
    head, token = won.nonzero(as_tuple=True)
    slot = slots[head, token]
    kept.positions[head, slot] = (first + token).int()
    kept.scores[head, slot] = scores[head, token]
    kept.states[head, slot] = POOL
    kept.k[head, slot] = k[head, token]
    kept.v[head, slot] = v[head, token]


def attend_kept(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    sides: Tensor,
    lo: Tensor,
    hi: Tensor,
    raw: RawFormat,
    fmt: KeptFormat,
    raw_base: int,
    side_base: int,
    heads: int,
    scale: float,
) -> Partial:
    """Attention over kept tokens. Arguments and results as in `reference.attend_raw`.

    pages: [B, K] i32 - raw pages of the slots; sides: [B] i32 - side records
    lo, hi: [B, M] i32 - query (b, m) sees slots that hold positions lo <= position < hi
    """
    k, v = gather_raw(arena, pages, raw, raw_base, heads)
    record = ArenaBlocks(arena, sides.unsqueeze(1), side_base, heads, fmt.block_bytes)
    shape = (1, fmt.slots)
    positions = record.plane(torch.int32, fmt.positions, shape)[:, :, 0, 0]  # [B, H, slots]
    states = record.plane(torch.uint8, fmt.states, shape)[:, :, 0, 0]
    room = min(fmt.slots, k.shape[2])
    place = positions[:, :, :room, None]
    seen = (place >= lo[:, None, None]) & (place < hi[:, None, None])  # [B, H, room, M]
    seen &= (states[:, :, :room] != FREE).unsqueeze(-1)
    columns = columns_of(q * scale, heads)
    hidden = ~seen.repeat_interleave(columns.shape[3] // lo.shape[1], 3)
    scores = (k[:, :, :room].to(q.dtype) @ columns).masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(2)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(2)).exp()
    o = v[:, :, :room].to(q.dtype).transpose(2, 3) @ p
    m = q.shape[1]
    return rows_of(o, m), rows_of(lse.unsqueeze(2), m).squeeze(3)
