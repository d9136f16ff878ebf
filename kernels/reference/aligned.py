"""Precision-aligned attention on bit planes, in plain torch: how many bits each number needs.

The exponent of an addend says how far its last bits lie below the others; those are not read:

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
    seen_tokens,
    visible_pages,
)
from disagg.kernels.view import Partial, View

LEVELS = (16, 12, 8)  # bits read
FEWER_AT = (4, 8)  # drops from which on the next level will do
CHUNK_ELEMENTS = 1 << 20  # of K that are worked on at a time
STRIDE = 32  # tokens with the largest weights, one of each residue class
EXPONENT_BIAS = 15
GUARD = (
    2  # one for an estimate that adds magnitudes, one for the product of two mantissas
)
SIGN, EXPONENT = 0x7FFF, 10


@dataclass(frozen=True)
class Bits:
    """Bits read of the numbers that a query sees: k, v [B, M, Hq] fp32, the mean of each."""

    k: Tensor
    v: Tensor


def attend(
    q: Tensor, view: View, scale: float, cap: float = 0.0
) -> tuple[Partial, Bits]:
    """Attention over bit planes. Arguments and partial result as in `exact.attend`.

    As many sequences and KV heads at a time as leave what is made on the way in a cache.

    returns: (o, lse), and the bits that were read for it
    error:   about 2**-10 relative against exact attention on the fp16 numbers
    """
    fmt, heads = view.fmt, view.heads
    assert isinstance(fmt, AlignedFormat)
    group, numbers = (
        q.shape[2] // heads,
        view.pages.shape[1] * fmt.tokens * fmt.head_dim,
    )
    some = min(heads, max(1, CHUNK_ELEMENTS // numbers))
    step = max(1, CHUNK_ELEMENTS // (numbers * heads))
    found: list[list[Tensor]] = []
    for row in range(0, q.shape[0], step):
        rows = slice(row, row + step)
        some_rows = replace(
            view, pages=view.pages[rows], lo=view.lo[rows], hi=view.hi[rows]
        )
        by_heads = []
        for head in range(0, heads, some):
            count, base = min(some, heads - head), view.base + fmt.block_bytes * head
            own = q[rows, :, head * group : (head + count) * group]
            by_heads.append(
                _attend(own, replace(some_rows, base=base, heads=count), scale, cap)
            )
        found.append([torch.cat(x, 2) for x in zip(*by_heads, strict=True)])
    o, lse, k_bits, v_bits = (torch.cat(x) for x in zip(*found, strict=True))
    return (o, lse), Bits(k_bits, v_bits)


def _attend(
    q: Tensor, view: View, scale: float, cap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, lse, bits of K, bits of V), all at once."""
    fmt = view.fmt
    assert isinstance(fmt, AlignedFormat)
    first, last = visible_pages(view, fmt.tokens)
    ids = view.pages[:, first:last]
    blocks = ArenaBlocks(view.arena, ids, view.base, view.heads, fmt.block_bytes)
    columns = columns_of(q * scale, view.heads)  # [B, H, D, N]
    seen = seen_tokens(view, first * fmt.tokens, (last - first) * fmt.tokens)
    pages = seen.squeeze(1).unflatten(1, (-1, fmt.tokens)).any(2)  # [B, P, M]
    group = q.shape[2] // view.heads
    k_drop = k_drops(columns, tops_of(blocks, fmt.k_top, fmt.head_dim, pages, group))
    scores = columns.new_zeros(())
    for level, share in zip(LEVELS, _by_level(columns, k_drop), strict=True):
        k = read_planes(blocks, fmt, "k", level).transpose(3, 4)  # [B, H, P, T, D]
        scores = scores + k.to(q.dtype) @ share.unsqueeze(2)
    p, lse = masked_softmax(scores.flatten(2, 3), seen, cap)
    high = read_planes(blocks, fmt, "v", 8).flatten(2, 3).to(q.dtype)
    v_drop = v_drops(p, high, tops_of(blocks, fmt.v_top, fmt.head_dim, pages, group))
    o = columns.new_zeros(())
    for level, share in zip(LEVELS, _by_level(p, v_drop), strict=True):
        v = (
            read_planes(blocks, fmt, "v", level).flatten(2, 3).to(q.dtype)
        )  # [B, H, PT, D]
        o = o + v.transpose(2, 3) @ share
    m = q.shape[1]
    return (
        *partial_of(o, lse, m),
        mean_bits(k_drop, None, m),
        mean_bits(v_drop, p > 0, m),
    )


def encode(k: Tensor, v: Tensor, fmt: AlignedFormat) -> Tensor:
    """Cut K and V [H, n, D] into planes: [n / tokens, H, block_bytes] u8; exact for fp16 input."""
    heads, n, _ = k.shape
    count = n // fmt.tokens
    blocks = torch.zeros(
        count, heads, fmt.block_bytes, dtype=torch.uint8, device=k.device
    )
    for name, x in (("k", k), ("v", v)):
        words = (
            to_fp16(x)
            .unflatten(1, (count, fmt.tokens))
            .transpose(0, 1)
            .view(torch.int16)
        )
        top = (words & SIGN).amax(2) >> EXPONENT
        if name == "k":
            words = words.transpose(2, 3)
        flat = words.int().flatten(2) & 0xFFFF
        pairs = flat.unflatten(2, (-1, 2))
        planes = {
            "high": flat >> 8,
            "middle": (pairs[..., 0] >> 4 & 15) | (pairs[..., 1] & 0xF0),
            "low": (pairs[..., 0] & 15) | (pairs[..., 1] & 15) << 4,
            "top": top,
        }
        for plane, value in planes.items():
            start = getattr(fmt, f"{name}_{plane}")
            blocks[..., start : start + value.shape[-1]] = value.to(torch.uint8)
    return blocks


def read_planes(blocks: Blocks, fmt: AlignedFormat, name: str, bits: int) -> Tensor:
    """K [..., D, tokens] or V [..., tokens, D] fp16 from their first `bits` bits."""
    shape = (fmt.head_dim, fmt.tokens) if name == "k" else (fmt.tokens, fmt.head_dim)
    half = (shape[0], shape[1] // 2)
    words = blocks.plane(torch.uint8, getattr(fmt, f"{name}_high"), shape).int() << 8
    if bits == 8:
        return _as_fp16(words | 0x80)
    middle = blocks.plane(torch.uint8, getattr(fmt, f"{name}_middle"), half).int()
    words = words | _nibbles(middle) << 4
    if bits == 12:
        return _as_fp16(words | 8)
    return _as_fp16(
        words
        | _nibbles(blocks.plane(torch.uint8, getattr(fmt, f"{name}_low"), half).int())
    )


def k_drops(columns: Tensor, tops: Tensor) -> Tensor:
    """How many bits above its share each channel's last bit lies: [B, H, D, N] i32.

    columns: [B, H, D, N] - scaled queries; tops: [B, H, D, N] - exponent fields of the maxima
    """
    exponent = exponents(columns) + tops
    return exponent.amax(2, keepdim=True) - exponent


def v_drops(p: Tensor, high: Tensor, tops: Tensor) -> Tensor:
    """The same for the tokens of V: [B, H, n, N] i32.

    p: [B, H, n, N] weights; high: [B, H, n, D] V from its high planes; tops: [B, H, D, N]
    """
    n = p.shape[2]
    sets = torch.nn.functional.pad(p, (0, 0, 0, -n % STRIDE)).unflatten(2, (-1, STRIDE))
    largest, index = sets.max(2, keepdim=True)
    chosen = torch.zeros_like(sets).scatter(2, index, largest)
    estimate = high.abs().transpose(2, 3) @ chosen.flatten(2, 3)[:, :, :n]
    return drops_below(estimate, p, tops)


def drops_below(estimate: Tensor, p: Tensor, tops: Tensor) -> Tensor:
    """`v_drops` where magnitudes of the output are about `estimate`, [B, H, D, N]."""
    exponent = torch.frexp(estimate).exponent - 1  # below fp16's normal numbers too
    allowed = exponent + 2 * EXPONENT_BIAS - GUARD - tops.clamp_min(1)
    return allowed.amin(2, keepdim=True) - exponents(p)


def exponents(x: Tensor) -> Tensor:
    """The exponent field of x as fp16: 0 for zero and subnormal numbers; i32."""
    return ((to_fp16(x).view(torch.int16) & SIGN) >> EXPONENT).int()


def _by_level(x: Tensor, drop: Tensor) -> list[Tensor]:
    """x split into three that add up to it: what is contracted with 16, 12 and 8 bits."""
    level = levels_of(drop)
    return [x * (level == i) for i in range(len(LEVELS))]


def levels_of(drop: Tensor) -> Tensor:
    """How much is left out: 0, 1 or 2 times four bits; i8."""
    return (drop >= FEWER_AT[0]).to(torch.int8) + (drop >= FEWER_AT[1]).to(torch.int8)


def mean_bits(drop: Tensor, counted: Tensor | None, m: int) -> Tensor:
    """Bits read on the mean [B, M, Hq] of drops [B, H, n, N], where they are counted."""
    bits = 16.0 - 4.0 * levels_of(drop)
    weight = torch.ones_like(bits) if counted is None else counted.float()
    mean = (bits * weight).sum(2) / weight.sum(2).clamp_min(1.0)
    return rows_of(mean.unsqueeze(2), m).squeeze(3)


def tops_of(
    blocks: ArenaBlocks, offset: int, head_dim: int, pages: Tensor, group: int
) -> Tensor:
    """The largest exponent field of each channel in the pages that a query sees: [B, H, D, N] i32.

    offset: of the plane; pages: [B, P, M] bool; group: columns of a query
    """
    tops = blocks.plane(torch.uint8, offset, (1, head_dim)).squeeze(3)  # [B, H, P, D]
    found = [(tops * one[:, None, :, None]).amax(2) for one in pages.unbind(2)]
    return torch.stack(found, 3).int().repeat_interleave(group, 3)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _as_fp16(words: Tensor) -> Tensor:
    return words.short().view(torch.float16)
