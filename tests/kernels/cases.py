"""Paged inputs for the kernel tests, and exact attention to hold the answers against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats import ARENA_UNIT, QuantFormat, RawFormat
from disagg.kernels.reference_encode import decode_quantized, encode_quantized
from disagg.kernels.reference_pages import store_blocks

BASE = 3 * 48  # an odd place for a layer page, 16-byte aligned


@dataclass(frozen=True)
class Case:
    """A ragged batch over shuffled pages; k, v [B, H, n, D] are what the pages hold."""

    q: Tensor
    arena: Tensor
    pages: Tensor
    lo: Tensor
    hi: Tensor
    k: Tensor
    v: Tensor


def quant_format(bits: int, head_dim: int, k_group: int, v_group: int, tokens: int = 64):
    """The block of a KIVI page: planes one after another, 16-byte aligned."""
    halves = 4 // bits
    shapes = [(tokens // 4, head_dim // halves), (head_dim // 4, tokens // halves)]
    shapes += 2 * [(tokens // k_group, head_dim)] + 2 * [(head_dim // v_group, tokens)]
    offsets, end = [], 0
    for rows, columns in shapes:
        offsets.append(end)
        end += -(-rows * columns * 2 // 16) * 16
    return QuantFormat(bits, tokens, head_dim, k_group, v_group, end, *offsets)


def raw_format(dtype: str, head_dim: int) -> RawFormat:
    size = 16 * head_dim * getattr(torch, dtype).itemsize
    return RawFormat(dtype, head_dim, 2 * size, 0, size)


def quant_case(fmt: QuantFormat, lengths: list[int], heads: int, width: int, m: int = 1) -> Case:
    """Sequences of `lengths` tokens whose last page is full of tokens nobody sees."""
    k, v = random_kv(lengths, heads, fmt.head_dim, fmt.tokens)
    blocks = [encode_quantized(k[i], v[i], fmt) for i in range(len(lengths))]
    arena, pages = place(torch.stack(blocks))
    decoded = decode_quantized(torch.stack(blocks), fmt)
    exact = [x.transpose(1, 2).flatten(2, 3) for x in decoded]
    return _case(arena, pages, lengths, heads * width, m, exact[0], exact[1])


def raw_case(fmt: RawFormat, lengths: list[int], heads: int, width: int, m: int = 1) -> Case:
    dtype = getattr(torch, fmt.dtype)
    k, v = (x.to(dtype) for x in random_kv(lengths, heads, fmt.head_dim, fmt.tokens))
    sides = [x.unflatten(2, (-1, fmt.tokens)).transpose(1, 2).flatten(3) for x in (k, v)]
    blocks = torch.cat([x.contiguous().view(torch.uint8) for x in sides], -1)
    arena, pages = place(blocks)
    return _case(arena, pages, lengths, heads * width, m, k.float(), v.float())


def random_kv(lengths: list[int], heads: int, head_dim: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys with a few loud channels, as models have them, and plain values."""
    count = -(-max(lengths) // tokens)
    shape = (len(lengths), heads, count * tokens, head_dim)
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    loud = 1 + 3 * (torch.arange(head_dim) % 17 == 3)
    k = torch.randn(shape, generator=generator) * loud + 0.5 * loud
    return k, torch.randn(shape, generator=generator)


def place(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks [B, P, H, block_bytes] at shuffled addresses: the arena and pages [B, P]."""
    batch, count = blocks.shape[:2]
    stride = -(-(BASE + blocks[0, 0].numel()) // ARENA_UNIT)
    generator = torch.Generator().manual_seed(batch * count)
    pages = (torch.randperm(batch * count + 1, generator=generator)[1:] * stride + 1).int()
    arena = torch.zeros((batch * count + 2) * stride * ARENA_UNIT, dtype=torch.uint8)
    store_blocks(arena, blocks.flatten(0, 1), pages, BASE)
    return arena, pages.view(batch, count)


def exact_attention(
    case: Case, scale: float, k: Tensor | None = None, v: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o [B, M, Hq, D] and lse [B, M, Hq] in fp64 from the K and V that the pages hold."""
    k, v = (case.k if k is None else k).double(), (case.v if v is None else v).double()
    width = case.q.shape[2] // k.shape[1]
    k, v = k.repeat_interleave(width, 1), v.repeat_interleave(width, 1)
    scores = torch.einsum("bmhd,bhnd->bmhn", case.q.double(), k) * scale
    position = torch.arange(k.shape[2])
    seen = (position >= case.lo[..., None]) & (position < case.hi[..., None])
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    p = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bmhn,bhnd->bmhd", p, v), scores.logsumexp(-1)


def relative_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def _case(arena, pages, lengths, query_heads, m, k, v) -> Case:
    batch = len(lengths)
    hi = torch.tensor([[max(0, n - m + 1 + j) for j in range(m)] for n in lengths]).int()
    generator = torch.Generator().manual_seed(query_heads)
    q = torch.randn(batch, m, query_heads, k.shape[3], generator=generator)
    for row, n in enumerate(lengths):  # short rows are padded with their first page
        used = max(1, -(-n // (k.shape[2] // pages.shape[1])))
        pages[row, used:] = pages[row, 0]
    return Case(q, arena, pages, torch.zeros_like(hi), hi, k, v)
