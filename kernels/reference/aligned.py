"""Precision-aligned attention on bit planes, in plain torch: reads only the bits that matter.

An addend much smaller than the largest one contributes only its leading bits; the rest is not read:

    K   drop of a channel = largest (exponent of q + of the channel's maximum) - this one
    V   drop of a token   = least over channels (exponent of the output - of the maximum) - of p
    drop < 4: 16 bits · < 8: 12 bits · else 8 bits; the bits not read count as 100...0

The exponent of the output comes from an estimate: the largest weight of each of 32 interleaved sets
of tokens, times the high planes. Every query head decides for itself.

source: AlignedKV, arXiv:2409.16546; the paper where its kernel differs (absolute maxima, thresholds
of 4 and 8 for V too, fp32 sums)
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from disagg.kernels.formats import AlignedFormat
from disagg.kernels.reference.pages import ArenaBlocks, Blocks
from disagg.kernels.reference.quantize import to_fp16
from disagg.kernels.reference.softmax import (
    columns_of,
    masked_softmax,
    partial_of,
    rows_of,
    visible_pages,
    visible_tokens,
)
from disagg.kernels.view import Partial, View

LEVELS = (16, 12, 8)  # bits read
FEWER_AT = (4, 8)  # drops from which on the next level will do
CHUNK_ELEMENTS = 1 << 20  # of K that are worked on at a time
STRIDE = 32  # tokens with the largest weights, one of each residue class
EXPONENT_BIAS = 15
# one for an estimate that adds magnitudes, one for the product of two mantissas
GUARD = 2
SIGN = 0x7FFF  # all bits of fp16 but the sign
EXPONENT = 10  # bits below the exponent field


@dataclass(frozen=True)
class Bits:
    """Mean bits read of each number of K and of V that a query sees: [B, M, Hq] fp32."""

    k: Tensor
    v: Tensor


def attend(
    q: Tensor,
    view: View,
    scale: float,
    cap: float = 0.0,
) -> tuple[Partial, Bits]:
    """Attention over bit planes. Arguments and partial result as in `exact.attend`.

    Sequences and KV heads are processed in chunks whose intermediate results fit a cache.

    returns: (o, lse), and the bits that were read for it
    error:   about 2**-10 relative against exact attention on the fp16 numbers
    """
    fmt = view.fmt
    assert isinstance(fmt, AlignedFormat)
    elements_per_head = view.pages.shape[1] * fmt.tokens * fmt.head_dim
    elements = elements_per_head * view.heads
    head_step = min(view.heads, max(1, CHUNK_ELEMENTS // elements_per_head))
    sequence_step = max(1, CHUNK_ELEMENTS // elements)
    results: list[list[Tensor]] = []
    for row in range(0, q.shape[0], sequence_step):
        rows = slice(row, row + sequence_step)
        own_view = replace(
            view, pages=view.pages[rows], lo=view.lo[rows], hi=view.hi[rows]
        )
        results.append(_attend_by_heads(q[rows], own_view, scale, cap, head_step))
    o, lse, k_bits, v_bits = _concatenate(results, 0)
    return (o, lse), Bits(k_bits, v_bits)


def _attend_by_heads(
    q: Tensor,
    view: View,
    scale: float,
    cap: float,
    head_step: int,
) -> list[Tensor]:
    """o, lse, bits of K and bits of V, `head_step` KV heads at a time."""
    fmt = view.fmt
    assert isinstance(fmt, AlignedFormat)
    group = q.shape[2] // view.heads
    results = []
    for head in range(0, view.heads, head_step):
        heads = min(head_step, view.heads - head)
        base = view.base + fmt.block_bytes * head
        own_view = replace(view, base=base, heads=heads)
        own_q = q[:, :, head * group : (head + heads) * group]
        results.append(_attend(own_q, own_view, scale, cap))
    return _concatenate(results, 2)


def _concatenate(results: list[list[Tensor]], dim: int) -> list[Tensor]:
    """The outputs of all results, concatenated."""
    return [torch.cat(parts, dim) for parts in zip(*results, strict=True)]


def _attend(
    q: Tensor,
    view: View,
    scale: float,
    cap: float,
) -> list[Tensor]:
    """o, lse, bits of K and bits of V, all at once."""
    fmt = view.fmt
    assert isinstance(fmt, AlignedFormat)
    first, last = visible_pages(view, fmt.tokens)
    ids = view.pages[:, first:last]
    blocks = ArenaBlocks(view.arena, ids, view.base, view.heads, fmt.block_bytes)
    queries = columns_of(q * scale, view.heads)  # [B, H, D, N]
    visible = visible_tokens(view, first * fmt.tokens, (last - first) * fmt.tokens)
    by_page = visible.squeeze(1).unflatten(1, (-1, fmt.tokens))  # [B, P, T, M]
    pages = by_page.any(2)  # [B, P, M]
    m = q.shape[1]
    group = q.shape[2] // view.heads

    k_tops = tops_of(blocks, fmt.k_top, fmt.head_dim, pages, group)  # [B, H, D, N]
    k_drop = k_drops(queries, k_tops)  # [B, H, D, N]
    scores = queries.new_zeros(())
    for level, part in zip(LEVELS, _by_level(queries, k_drop), strict=True):
        k = read_planes(blocks, fmt, "k", level).transpose(3, 4)  # [B, H, P, T, D]
        scores = scores + k.to(q.dtype) @ part.unsqueeze(2)  # [B, H, P, T, N]
    p, lse = masked_softmax(scores.flatten(2, 3), visible, cap)  # [B, H, n, N]

    high = read_planes(blocks, fmt, "v", 8).flatten(2, 3).to(q.dtype)  # [B, H, n, D]
    v_tops = tops_of(blocks, fmt.v_top, fmt.head_dim, pages, group)
    v_drop = v_drops(p, high, v_tops)  # [B, H, n, N]
    o = queries.new_zeros(())
    for level, part in zip(LEVELS, _by_level(p, v_drop), strict=True):
        v = read_planes(blocks, fmt, "v", level).flatten(2, 3)  # [B, H, n, D]
        o = o + v.to(q.dtype).transpose(2, 3) @ part  # [B, H, D, N]

    o, lse = partial_of(o, lse, m)
    return [o, lse, mean_bits(k_drop, None, m), mean_bits(v_drop, p > 0, m)]


def encode(
    k: Tensor,
    v: Tensor,
    fmt: AlignedFormat,
) -> Tensor:
    """Cut K and V [H, n, D] into planes: [n / tokens, H, block_bytes] u8; exact for fp16 input."""
    heads, n, _ = k.shape
    count = n // fmt.tokens
    shape = (count, heads, fmt.block_bytes)
    blocks = torch.zeros(shape, dtype=torch.uint8, device=k.device)
    for name, x in (("k", k), ("v", v)):
        by_page = to_fp16(x).unflatten(1, (count, fmt.tokens)).transpose(0, 1)
        words = by_page.view(torch.int16)  # [P, H, T, D]
        top = (words & SIGN).amax(2) >> EXPONENT  # [P, H, D]
        if name == "k":
            words = words.transpose(2, 3)
        unsigned = words.int().flatten(2) & 0xFFFF  # [P, H, T * D]
        first, second = unsigned.unflatten(2, (-1, 2)).unbind(-1)
        planes = {
            "high": unsigned >> 8,
            "middle": (first >> 4 & 15) | (second & 0xF0),
            "low": (first & 15) | (second & 15) << 4,
            "top": top,
        }
        for plane, numbers in planes.items():
            start = getattr(fmt, f"{name}_{plane}")
            end = start + numbers.shape[-1]
            blocks[..., start:end] = numbers.to(torch.uint8)
    return blocks


def read_planes(
    blocks: Blocks,
    fmt: AlignedFormat,
    name: str,
    bits: int,
) -> Tensor:
    """K [..., D, tokens] or V [..., tokens, D] fp16 from their first `bits` bits."""
    rows, columns = fmt.tokens, fmt.head_dim
    if name == "k":
        rows, columns = columns, rows
    whole = (rows, columns)
    half = (rows, columns // 2)
    high = blocks.plane(torch.uint8, getattr(fmt, f"{name}_high"), whole).int()
    words = high << 8
    if bits == 8:
        return _as_fp16(words | 0x80)
    middle = blocks.plane(torch.uint8, getattr(fmt, f"{name}_middle"), half).int()
    words = words | _nibbles(middle) << 4
    if bits == 12:
        return _as_fp16(words | 8)
    low = blocks.plane(torch.uint8, getattr(fmt, f"{name}_low"), half).int()
    return _as_fp16(words | _nibbles(low))


def k_drops(columns: Tensor, tops: Tensor) -> Tensor:
    """By how many powers of two each channel of K lies below the largest: [B, H, D, N] i32.

    columns: [B, H, D, N] - scaled queries
    tops:    [B, H, D, N] - exponent fields of the maxima
    """
    exponent = exponents(columns) + tops
    return exponent.amax(2, keepdim=True) - exponent


def v_drops(
    p: Tensor,
    high: Tensor,
    tops: Tensor,
) -> Tensor:
    """By how many powers of two each token of V lies below the output: [B, H, n, N] i32.

    p:    [B, H, n, N] weights
    high: [B, H, n, D] V from its high planes
    tops: [B, H, D, N]
    """
    n = p.shape[2]
    padded = torch.nn.functional.pad(p, (0, 0, 0, -n % STRIDE))
    sets = padded.unflatten(2, (-1, STRIDE))  # [B, H, n / STRIDE, STRIDE, N]
    largest, index = sets.max(2, keepdim=True)
    sampled = torch.zeros_like(sets).scatter(2, index, largest)
    weights = sampled.flatten(2, 3)[:, :, :n]  # [B, H, n, N]
    estimate = high.abs().transpose(2, 3) @ weights  # [B, H, D, N]
    return drops_below(estimate, p, tops)


def drops_below(
    estimate: Tensor,
    p: Tensor,
    tops: Tensor,
) -> Tensor:
    """`v_drops` where magnitudes of the output are about `estimate`, [B, H, D, N]."""
    # frexp: exponents below fp16's normal numbers too
    exponent = torch.frexp(estimate).exponent - 1
    allowed = exponent + 2 * EXPONENT_BIAS - GUARD - tops.clamp_min(1)
    return allowed.amin(2, keepdim=True) - exponents(p)


def exponents(x: Tensor) -> Tensor:
    """The exponent field of x as fp16: 0 for zero and subnormal numbers; i32."""
    words = to_fp16(x).view(torch.int16)
    return ((words & SIGN) >> EXPONENT).int()


def _by_level(x: Tensor, drop: Tensor) -> list[Tensor]:
    """x split by level into three tensors that add up to it: for 16, 12 and 8 bits."""
    level = levels_of(drop)
    return [x * (level == i) for i in range(len(LEVELS))]


def levels_of(drop: Tensor) -> Tensor:
    """The index in LEVELS of the bits that are read: 0, 1 or 2; i8."""
    drops_four = (drop >= FEWER_AT[0]).to(torch.int8)
    drops_eight = (drop >= FEWER_AT[1]).to(torch.int8)
    return drops_four + drops_eight


def mean_bits(
    drop: Tensor,
    counted: Tensor | None,
    m: int,
) -> Tensor:
    """The mean number of bits read [B, M, Hq], from drops [B, H, n, N]."""
    bits = 16.0 - 4.0 * levels_of(drop)
    weight = torch.ones_like(bits) if counted is None else counted.float()
    total = weight.sum(2).clamp_min(1.0)
    mean = (bits * weight).sum(2) / total  # [B, H, N]
    return rows_of(mean.unsqueeze(2), m).squeeze(3)


def tops_of(
    blocks: ArenaBlocks,
    offset: int,
    head_dim: int,
    pages: Tensor,
    group: int,
) -> Tensor:
    """The largest exponent field of each channel in the pages that a query sees: [B, H, D, N] i32.

    offset: of the plane
    pages:  [B, P, M] bool
    group:  query heads of a KV head
    """
    tops = blocks.plane(torch.uint8, offset, (1, head_dim)).squeeze(3)  # [B, H, P, D]
    by_query = []
    for sees_page in pages.unbind(2):  # [B, P]
        visible_tops = tops * sees_page[:, None, :, None]
        by_query.append(visible_tops.amax(2))
    return torch.stack(by_query, 3).int().repeat_interleave(group, 3)


def _nibbles(packed: Tensor) -> Tensor:
    """The low nibble of each byte, then the high one: [..., n] -> [..., 2 * n]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _as_fp16(words: Tensor) -> Tensor:
    return words.short().view(torch.float16)
