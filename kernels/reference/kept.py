"""Which tokens a KV head keeps, in torch on any device: outliers kept exact, and heavy hitters.

Each head chooses for itself, so slot s of head 0 and of head 1 hold different tokens. A side record
says per slot which position it holds, its score and its state:

    FREE     nothing here yet
    POOL     one of the best so far; a better token may take its place in the pool
    RETIRED  no longer one of the best, still kept: its place among the codes is gone

Slots are only ever appended; a change of state is a flag. Nothing asks the host for a number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats import FREE, POOL, RETIRED, ExactFormat, SlotsFormat
from disagg.kernels.reference.pages import DenseBlocks, exact_tokens
from disagg.kernels.reference.softmax import capped
from disagg.kernels.view import Softmax


@dataclass
class KeptSlots:
    """The slots of every head, as views that can be written to.

    positions, scores, states: [H, slots]; k, v: [H, room, D] - room for slots, in raw pages
    """

    positions: Tensor
    scores: Tensor
    states: Tensor
    k: Tensor
    v: Tensor


def view_kept(
    side: Tensor, blocks: Tensor, fmt: SlotsFormat, raw: ExactFormat
) -> KeptSlots:
    """Views of a side record [H, side bytes] u8; copies of raw pages [K, H, raw bytes] u8."""
    planes, shape = DenseBlocks(side), (1, fmt.slots)
    return KeptSlots(
        planes.plane(torch.int32, fmt.positions, shape).squeeze(-2),
        planes.plane(torch.float32, fmt.scores, shape).squeeze(-2),
        planes.plane(torch.uint8, fmt.states, shape).squeeze(-2),
        *exact_tokens(blocks, raw),
    )


def keep_outliers(
    kept: KeptSlots, k: Tensor, v: Tensor, count: int, first: int
) -> Tensor:
    """Let tokens first .. first+n-1 compete with the pool by |K|_1, and keep the winners.

    The `count` lowest scores of a head are its pool from then on; of equals the earlier wins. A
    head with too few free slots for its winners stays as it is.

    k, v:    [H, n, D] of the raw dtype
    returns: [H, n] bool - the winners; they lie in free slots in order of position, and who they
             have beaten is retired
    """
    scores = k.float().abs().sum(2)
    heads, n = scores.shape
    slots, room = kept.states.shape[1], min(kept.states.shape[1], kept.k.shape[1])
    pool, used = kept.states == POOL, (kept.states != FREE).sum(1, keepdim=True)

    ranked = torch.cat([kept.scores.masked_fill(~pool, torch.inf), scores], 1)
    best = torch.zeros(heads, slots + n, dtype=torch.bool, device=scores.device)
    best.scatter_(1, ranked.sort(dim=1, stable=True).indices[:, :count], True)
    fits = used + best[:, slots:].sum(1, keepdim=True) <= slots
    won = best[:, slots:] & fits
    kept.states.masked_fill_(pool & ~best[:, :slots] & fits, RETIRED)

    slot = torch.where(won, used + won.long().cumsum(1) - 1, slots)  # `slots`: nowhere
    source = slot.new_full((heads, slots + 1), -1)
    source.scatter_(1, slot, torch.arange(n, device=slot.device).expand(heads, n))
    source = source[:, :slots]
    taken, token = source >= 0, source.clamp_min(0)
    kept.positions.copy_(torch.where(taken, first + token, kept.positions))
    kept.scores.copy_(torch.where(taken, scores.gather(1, token), kept.scores))
    kept.states.masked_fill_(taken, POOL)
    taken, token = (
        taken[:, :room, None],
        token[:, :room, None].expand(-1, -1, k.shape[2]),
    )
    for into, x in ((kept.k, k), (kept.v, v)):
        into[:, :room] = torch.where(taken, x.gather(1, token), into[:, :room])
    return won


def weights_received(q: Tensor, k: Tensor, softmax: Softmax, total: int) -> Tensor:
    """How much attention each of the first n tokens gets from the last W of `total`: [H, n] fp32.

    q: [Hq, W, D] - queries of tokens total - W .. total - 1; k: [H, n, D]. The softmax is over
    these n tokens, which only scales what a query gives them, as sinks would
    """
    heads, n, head_dim = k.shape
    width, last = q.shape[0] // heads, q.shape[1]
    rows = q.float().reshape(heads, width * last, head_dim) * softmax.scale
    scores = capped(rows @ k.float().transpose(1, 2), softmax.cap)  # [H, width * W, n]
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
    last = torch.arange(n - recent, n, device=weights.device).expand(
        weights.shape[0], -1
    )
    return torch.cat([chosen, last], 1).sort(dim=1).values
