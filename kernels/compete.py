"""Which tokens a head keeps exact, on a GPU: the Triton form of reference_kept.keep_outliers.

The pool and the new tokens stand in one row, slots first. A round of competition finds the smallest
(score, place) pair that comes after the pair of the round before, so nothing is crossed out and the
last pair alone says who is in. Nothing is read back: a winner finds its slot by counting.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from disagg.kernels.reference_kept import FREE, POOL, RETIRED, Kept

BLOCK = 1024  # tokens that a head looks at together
FAR = tl.constexpr(1 << 30)  # a place behind all places
IS_FREE, IS_POOL, IS_RETIRED = tl.constexpr(FREE), tl.constexpr(POOL), tl.constexpr(RETIRED)


@triton.jit
def key_norms_kernel(
    k_ptr, norms_ptr, stride_head, stride_token, stride_channel, n,
    D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Sums of magnitudes: k_ptr [H, n, D] of any float dtype -> norms_ptr [H, n] fp32."""
    i_head = tl.program_id(0).to(tl.int64)
    o_t = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    o_d = tl.arange(0, triton.next_power_of_2(D))
    m_k = (o_t < n)[:, None] & (o_d < D)[None, :]
    p_k = k_ptr + i_head * stride_head + o_t[:, None] * stride_token
    b_k = tl.load(p_k + o_d[None, :] * stride_channel, mask=m_k, other=0.0).to(tl.float32)
    tl.store(norms_ptr + i_head * n + o_t, tl.sum(tl.abs(b_k), 1), mask=o_t < n)


@triton.jit
def compete_kernel(
    norms_ptr, scores_ptr, states_ptr, won_ptr, source_ptr, stride_scores, stride_states, n, count,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The competition of one head.

    norms_ptr:              [H, n] fp32 - scores of the new tokens
    scores_ptr, states_ptr: [H, SLOTS] fp32, u8 - of the slots; the states of the beaten change
    won_ptr:                [H, n] u8
    source_ptr:             [H, SLOTS] i32 - the token that goes to a slot, where one does
    """
    i_head = tl.program_id(0).to(tl.int64)
    norms_ptr += i_head * n
    o_s = tl.arange(0, triton.next_power_of_2(SLOTS))
    o_n = tl.arange(0, BLOCK)
    p_state = states_ptr + i_head * stride_states + o_s
    state = tl.load(p_state, mask=o_s < SLOTS, other=IS_RETIRED)
    in_pool = state == IS_POOL
    score = tl.load(scores_ptr + i_head * stride_scores + o_s, mask=in_pool, other=float("inf"))
    last = float("-inf")
    place = -1
    for _ in range(count):
        best, where = first_after(score, o_s, in_pool, last, place)
        for i in range(0, n, BLOCK):
            norm = tl.load(norms_ptr + i + o_n, mask=i + o_n < n, other=float("inf"))
            other, there = first_after(norm, SLOTS + i + o_n, i + o_n < n, last, place)
            sooner = (other < best) | ((other == best) & (there < where))
            best, where = tl.where(sooner, other, best), tl.where(sooner, there, where)
        last, place = best, where
    winners = 0
    for i in range(0, n, BLOCK):
        norm = tl.load(norms_ptr + i + o_n, mask=i + o_n < n, other=float("inf"))
        is_in = not_after(norm, SLOTS + i + o_n, last, place) & (i + o_n < n)
        winners += tl.sum(is_in.to(tl.int32), 0)
    fits = winners <= tl.sum((state == IS_FREE).to(tl.int32), 0)
    # without room nobody is beaten and nobody is in
    bar, bar_place = tl.where(fits, last, float("inf")), tl.where(fits, place, FAR)
    beaten = in_pool & comes_after(score, o_s, bar, bar_place)
    last, place = tl.where(fits, last, float("-inf")), tl.where(fits, place, -1)
    tl.store(p_state, tl.full(state.shape, IS_RETIRED, tl.uint8), mask=beaten)
    slot = tl.sum(((state != IS_FREE) & (o_s < SLOTS)).to(tl.int32), 0) - 1
    for i in range(0, n, BLOCK):
        norm = tl.load(norms_ptr + i + o_n, mask=i + o_n < n, other=float("inf"))
        is_in = not_after(norm, SLOTS + i + o_n, last, place) & (i + o_n < n)
        tl.store(won_ptr + i_head * n + i + o_n, is_in.to(tl.uint8), mask=i + o_n < n)
        o_slot = slot + tl.cumsum(is_in.to(tl.int32), 0)
        tl.store(source_ptr + i_head * SLOTS + o_slot, i + o_n, mask=is_in)
        slot += tl.sum(is_in.to(tl.int32), 0)


@triton.jit
def first_after(score, place, there, last, last_place):
    """The smallest (score, place) after (last, last_place); (inf, FAR) if there is none."""
    after = there & comes_after(score, place, last, last_place)
    smallest = tl.min(tl.where(after, score, float("inf")), 0)
    return smallest, tl.min(tl.where(after & (score == smallest), place, FAR), 0)


@triton.jit
def comes_after(score, place, last, last_place):
    """Whether (score, place) is larger than (last, last_place)."""
    return (score > last) | ((score == last) & (place > last_place))


@triton.jit
def not_after(score, place, last, last_place):
    """Whether it is not; not a number is neither."""
    return (score < last) | ((score == last) & (place <= last_place))


@triton.jit
def keep_kernel(
    source_ptr, norms_ptr, k_ptr, v_ptr, positions_ptr, scores_ptr, states_ptr, kept_k_ptr,
    kept_v_ptr, k_head, k_token, v_head, v_token, stride_positions, stride_scores, stride_states,
    kept_head, n, first, D: tl.constexpr,
):  # fmt: skip
    """Write the token of one slot, if one goes there. kept_k_ptr, kept_v_ptr: [H, room, D]; a
    slot has D items next to one another, a head begins kept_head further."""
    i_head, i_slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(source_ptr + i_head * tl.num_programs(1) + i_slot).to(tl.int64)
    if token < 0:
        return
    tl.store(positions_ptr + i_head * stride_positions + i_slot, (first + token).to(tl.int32))
    tl.store(scores_ptr + i_head * stride_scores + i_slot, tl.load(norms_ptr + i_head * n + token))
    tl.store(states_ptr + i_head * stride_states + i_slot, IS_POOL)
    o_d = tl.arange(0, triton.next_power_of_2(D))
    p_k = k_ptr + i_head * k_head + token * k_token + o_d
    p_v = v_ptr + i_head * v_head + token * v_token + o_d
    o_kept = i_head * kept_head + i_slot * D + o_d
    tl.store(kept_k_ptr + o_kept, tl.load(p_k, mask=o_d < D, other=0), mask=o_d < D)
    tl.store(kept_v_ptr + o_kept, tl.load(p_v, mask=o_d < D, other=0), mask=o_d < D)


def keep_outliers(kept: Kept, k: Tensor, v: Tensor, count: int, first: int) -> Tensor:
    """Let tokens compete and keep the winners. As in reference_kept.keep_outliers.

    error: norms are summed in another order, so scores are off by 1e-6 relative, and of two tokens
           that are closer than that either may win
    """
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the channels of k and v are not adjacent in memory")
    if kept.k.stride()[1:] != (k.shape[2], 1) or kept.k.stride() != kept.v.stride():
        raise ValueError("the k and v of slots are wanted token by token in memory")
    heads, n, head_dim = k.shape
    slots, device = kept.states.shape[1], k.device
    norms = torch.empty(heads, n, device=device)
    won = torch.empty(heads, n, dtype=torch.uint8, device=device)
    source = torch.full((heads, slots), -1, dtype=torch.int32, device=device)
    key_norms_kernel[(heads, triton.cdiv(n, 64))](
        k, norms, *k.stride(), n, head_dim, 64, num_warps=4, enable_fp_fusion=False
    )
    compete_kernel[(heads,)](
        norms, kept.scores, kept.states, won, source,
        kept.scores.stride(0), kept.states.stride(0), n, count, slots, BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    keep_kernel[(heads, slots)](
        source, norms, k, v, kept.positions, kept.scores, kept.states, kept.k, kept.v,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kept.positions.stride(0), kept.scores.stride(0), kept.states.stride(0),
        kept.k.stride(0), n, first, head_dim, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return won.view(torch.bool)
