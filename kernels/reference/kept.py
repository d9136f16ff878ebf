"""The tokens that a KV head keeps exact: outliers and heavy hitters. In torch, on any device.

Heads choose independently, so slot s of head 0 and of head 1 hold different tokens. A side record
has the position, score and state of each slot:

    FREE     empty
    POOL     one of the best so far; a better token may take its place in the pool
    RETIRED  no longer one of the best; it stays exact, because no page has codes for it

Slots are only appended; retiring one sets a flag. Nothing waits for the host.
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

    positions, scores, states: [H, slots]
    k, v: [H, room, D] - room for slots, in raw pages
    """

    positions: Tensor
    scores: Tensor
    states: Tensor
    k: Tensor
    v: Tensor


def view_kept(
    side: Tensor,
    blocks: Tensor,
    fmt: SlotsFormat,
    raw: ExactFormat,
) -> KeptSlots:
    """Views of a side record [H, side bytes] u8; copies of raw pages [K, H, raw bytes] u8."""
    planes = DenseBlocks(side)
    shape = (1, fmt.slots)
    k, v = exact_tokens(blocks, raw)
    return KeptSlots(
        positions=planes.plane(torch.int32, fmt.positions, shape).squeeze(-2),
        scores=planes.plane(torch.float32, fmt.scores, shape).squeeze(-2),
        states=planes.plane(torch.uint8, fmt.states, shape).squeeze(-2),
        k=k,
        v=v,
    )


def keep_outliers(
    slots: KeptSlots,
    k: Tensor,
    v: Tensor,
    count: int,
    first: int,
) -> Tensor:
    """Let tokens first .. first+n-1 compete with the pool by |K|_1, and keep the winners.

    The `count` lowest scores of a head form its new pool; the earlier of equal tokens wins. A head
    with too few free slots for its winners does not change.

    k, v:    [H, n, D] of the raw dtype
    returns: [H, n] bool - the winners. They take free slots in order of position; pool members
             that they beat are retired
    """
    scores = k.float().abs().sum(2)  # [H, n]
    is_pool = slots.states == POOL  # [H, slots]
    used = (slots.states != FREE).sum(1, keepdim=True)  # [H, 1]
    num_slots = slots.states.shape[1]

    best = _best(slots.scores.masked_fill(~is_pool, torch.inf), scores, count)
    stays_best = best[:, :num_slots]
    is_winner = best[:, num_slots:]
    fits = used + is_winner.sum(1, keepdim=True) <= num_slots  # [H, 1]
    is_winner = is_winner & fits
    slots.states.masked_fill_(is_pool & ~stays_best & fits, RETIRED)

    token = _token_of_slot(is_winner, used, num_slots)  # [H, slots]
    _write_winners(slots, scores, k, v, token, first)
    return is_winner


def weights_received(
    q: Tensor,
    k: Tensor,
    softmax: Softmax,
    total: int,
) -> Tensor:
    """Attention that each of the first n tokens gets from the last W of `total`: [H, n] fp32.

    The softmax is over these n tokens only, which scales the weights of each query by a constant.

    q: [Hq, W, D] - queries of tokens total - W .. total - 1
    k: [H, n, D]
    """
    heads, n, head_dim = k.shape
    group = q.shape[0] // heads
    window = q.shape[1]
    rows = q.float().reshape(heads, group * window, head_dim) * softmax.scale
    scores = capped(rows @ k.float().transpose(1, 2), softmax.cap)  # [H, G * W, n]
    query_positions = torch.arange(total - window, total, device=k.device)
    key_positions = torch.arange(n, device=k.device)
    is_future = key_positions > query_positions.repeat(group)[:, None]
    weights = scores.masked_fill(is_future, -torch.inf).softmax(-1)
    return weights.sum(1)


def heaviest_and_recent(
    weights: Tensor,
    count: int,
    recent: int,
) -> Tensor:
    """Positions of the `recent` last tokens and of the heaviest others: [H, count] i64, ascending.

    weights: [H, n]; of equals the earlier one stays
    """
    heads, n = weights.shape
    first_recent = n - recent
    by_weight = weights[:, :first_recent].sort(dim=1, descending=True, stable=True)
    heaviest = by_weight.indices[:, : count - recent]
    last = torch.arange(first_recent, n, device=weights.device)
    positions = torch.cat([heaviest, last.expand(heads, -1)], 1)
    return positions.sort(dim=1).values


def _best(
    pool_scores: Tensor,
    scores: Tensor,
    count: int,
) -> Tensor:
    """The `count` lowest of the scores of pool and tokens: [H, slots + n] bool."""
    all_scores = torch.cat([pool_scores, scores], 1)
    ranking = all_scores.sort(dim=1, stable=True).indices
    best = torch.zeros_like(all_scores, dtype=torch.bool)
    return best.scatter_(1, ranking[:, :count], True)


def _token_of_slot(
    is_winner: Tensor,
    used: Tensor,
    num_slots: int,
) -> Tensor:
    """The index of the new token for each slot, -1 for none: [H, slots] i64.

    is_winner: [H, n] bool
    used:      [H, 1] - slots in use before
    """
    heads, n = is_winner.shape
    rank = is_winner.long().cumsum(1) - 1
    nowhere = num_slots  # one column more, which is cut off
    slot_of_token = torch.where(is_winner, used + rank, nowhere)
    token = slot_of_token.new_full((heads, num_slots + 1), -1)
    index = torch.arange(n, device=token.device)
    token.scatter_(1, slot_of_token, index.expand(heads, n))
    return token[:, :num_slots]


def _write_winners(
    slots: KeptSlots,
    scores: Tensor,
    k: Tensor,
    v: Tensor,
    token: Tensor,
    first: int,
) -> None:
    """Write the tokens that each slot takes: position, score, state, and K and V."""
    is_new = token >= 0  # [H, slots]
    token = token.clamp_min(0)
    slots.positions.copy_(torch.where(is_new, first + token, slots.positions))
    slots.scores.copy_(torch.where(is_new, scores.gather(1, token), slots.scores))
    slots.states.masked_fill_(is_new, POOL)
    room = min(slots.states.shape[1], slots.k.shape[1])
    is_new = is_new[:, :room, None]
    token = token[:, :room, None].expand(-1, -1, k.shape[2])
    slots.k[:, :room] = torch.where(is_new, k.gather(1, token), slots.k[:, :room])
    slots.v[:, :room] = torch.where(is_new, v.gather(1, token), slots.v[:, :room])
