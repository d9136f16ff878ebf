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

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats_aligned import AlignedFormat
from disagg.kernels.reference import Partial, columns_of, masked_softmax, rows_of, visible_pages
from disagg.kernels.reference_pieces import ArenaBlocks, Blocks

LEVELS = (16, 12, 8)  # bits read
FEWER_AT = (4, 8)  # drops from which on the next level will do
CHUNK_ELEMENTS = 1 << 20  # of K that are worked on at a time
STRIDE = 32  # tokens with the largest weights, one of each residue class
EXPONENT_BIAS = 15
GUARD = 2  # one for an estimate that adds magnitudes, one for the product of two mantissas
SIGN, EXPONENT = 0x7FFF, 10


@dataclass(frozen=True)
class Bits:
    """Bits read of the numbers that a query sees: k, v [B, M, Hq] fp32, the mean of each."""

    k: Tensor
    v: Tensor


def attend_aligned(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: AlignedFormat,
    base: int,
    heads: int,
    scale: float,
) -> tuple[Partial, Bits]:
    """Attention over bit planes. Arguments and partial as in `reference.attend_raw`.

    As many sequences and KV heads at a time as leave what is made on the way in a cache.

    returns: (o, lse), and the bits that were read for it
    error:   about 2**-10 relative against exact attention on the fp16 numbers
    """
    group, numbers = q.shape[2] // heads, pages.shape[1] * fmt.tokens * fmt.head_dim
    some = min(heads, max(1, CHUNK_ELEMENTS // numbers))
    step = max(1, CHUNK_ELEMENTS // (numbers * heads))
    found: list[list[Tensor]] = []
    for row in range(0, q.shape[0], step):
        rows = slice(row, row + step)
        by_heads = []
        for head in range(0, heads, some):
            count = min(some, heads - head)
            part, place = q[rows, :, head * group : (head + count) * group], fmt.block_bytes * head
            tables = pages[rows], lo[rows], hi[rows]
            by_heads.append(_attend(part, arena, *tables, fmt, base + place, count, scale))
        found.append([torch.cat(parts, 2) for parts in zip(*by_heads, strict=True)])
    o, lse, k_bits, v_bits = (torch.cat(parts) for parts in zip(*found, strict=True))
    return (o, lse), Bits(k_bits, v_bits)


def _attend(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: AlignedFormat,
    base: int,
    heads: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, lse, bits of K, bits of V), all at once."""
    first, last = visible_pages(lo, hi, fmt.tokens)
    blocks = ArenaBlocks(arena, pages[:, first:last], base, heads, fmt.block_bytes)
    lo, hi = lo - first * fmt.tokens, hi - first * fmt.tokens
    columns = columns_of(q * scale, heads)  # [B, H, D, N]
    seen = _seen_pages(lo, hi, fmt.tokens, last - first, columns.shape[3] // lo.shape[1])
    k_drop = k_drops(columns, _tops(blocks, fmt.k_top, fmt, seen))
    scores = columns.new_zeros(())
    for level, share in zip(LEVELS, _by_level(columns, k_drop), strict=True):
        k = read_planes(blocks, fmt, "k", level).transpose(3, 4)  # [B, H, P, T, D]
        scores = scores + k.to(q.dtype) @ share.unsqueeze(2)
    p, lse = masked_softmax(scores.flatten(2, 3), lo, hi)
    high = read_planes(blocks, fmt, "v", 8).flatten(2, 3).to(q.dtype)
    v_drop = v_drops(p, high, _tops(blocks, fmt.v_top, fmt, seen))
    o = columns.new_zeros(())
    for level, share in zip(LEVELS, _by_level(p, v_drop), strict=True):
        v = read_planes(blocks, fmt, "v", level).flatten(2, 3).to(q.dtype)  # [B, H, PT, D]
        o = o + v.transpose(2, 3) @ share
    m = q.shape[1]
    lse = rows_of(lse.unsqueeze(2), m).squeeze(3)
    return rows_of(o, m), lse, _mean_bits(k_drop, None, m), _mean_bits(v_drop, p > 0, m)


def encode_aligned(k: Tensor, v: Tensor, fmt: AlignedFormat) -> Tensor:
    """Cut K and V [H, n, D] into planes: [n / tokens, H, block_bytes] u8; exact for fp16 input."""
    heads, n, _ = k.shape
    count = n // fmt.tokens
    blocks = torch.zeros(count, heads, fmt.block_bytes, dtype=torch.uint8, device=k.device)
    for name, x in (("k", k), ("v", v)):
        words = to_fp16(x).unflatten(1, (count, fmt.tokens)).transpose(0, 1).view(torch.int16)
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
        words | _nibbles(blocks.plane(torch.uint8, getattr(fmt, f"{name}_low"), half).int())
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
    padded = torch.nn.functional.pad(p, (0, 0, 0, -n % STRIDE))
    largest = padded.unflatten(2, (-1, STRIDE)).amax(2, keepdim=True)
    chosen = torch.where(padded.unflatten(2, (-1, STRIDE)) == largest, largest, 0.0)
    estimate = high.abs().transpose(2, 3) @ chosen.flatten(2, 3)[:, :, :n]
    allowed = (exponents(estimate) - GUARD + EXPONENT_BIAS - tops).amin(2, keepdim=True)
    return allowed - exponents(p)


def exponents(x: Tensor) -> Tensor:
    """The exponent field of x as fp16: 0 for zero and subnormal numbers; i32."""
    return ((to_fp16(x).view(torch.int16) & SIGN) >> EXPONENT).int()


def to_fp16(x: Tensor) -> Tensor:
    """x as fp16, saturated at +-65504; NaN becomes 0."""
    return torch.nan_to_num(x.float(), nan=0.0).clamp(-65504.0, 65504.0).half()


def _by_level(x: Tensor, drop: Tensor) -> list[Tensor]:
    """x split into three that add up to it: what is contracted with 16, 12 and 8 bits."""
    few, fewer = FEWER_AT
    masks = (drop < few, (drop >= few) & (drop < fewer), drop >= fewer)
    return [x * mask for mask in masks]


def _mean_bits(drop: Tensor, counted: Tensor | None, m: int) -> Tensor:
    few, fewer = FEWER_AT
    bits = 16.0 - 4.0 * (drop >= few) - 4.0 * (drop >= fewer)
    weight = torch.ones_like(bits) if counted is None else counted.float()
    mean = (bits * weight).sum(2) / weight.sum(2).clamp_min(1.0)
    return rows_of(mean.unsqueeze(2), m).squeeze(3)


def _tops(blocks: ArenaBlocks, offset: int, fmt: AlignedFormat, seen: Tensor) -> Tensor:
    """The largest exponent field of each channel in the pages that a query sees: [B, H, D, N]."""
    tops = blocks.plane(torch.uint8, offset, (1, fmt.head_dim)).squeeze(3).int()  # [B, H, P, D]
    return (tops.unsqueeze(4) * seen[:, None, :, None, :]).amax(2)


def _seen_pages(lo: Tensor, hi: Tensor, tokens: int, count: int, width: int) -> Tensor:
    """[B, P, N] i32: 1 where a query sees a token of the page."""
    start = torch.arange(count, device=lo.device)[:, None] * tokens
    seen = (hi[:, None] > start) & (lo[:, None] < start + tokens)
    return seen.repeat_interleave(width, 2).int()


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _as_fp16(words: Tensor) -> Tensor:
    return words.short().view(torch.float16)
