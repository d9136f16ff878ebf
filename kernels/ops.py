"""The kernels as the other rooms call them: arguments checked here, run by device.

A tensor on a GPU goes to the Triton kernel; one on a CPU to the C library (cpu/), and where that is
not built or does not know a format to the reference; all of one name and signature. Shapes and
units are stated in reference.py and reference_encode.py. A wrong dtype raises TypeError, a wrong
shape, device or memory order ValueError. No silent copies.

Triton is imported on the first call that needs it: a machine without a GPU starts faster, and runs
where there is no Triton at all.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from disagg.kernels import (
    reference,
    reference_encode,
    reference_pages,
)
from disagg.kernels.cpu.append import append as append_on_cpu
from disagg.kernels.cpu.attend import Waiting, is_served
from disagg.kernels.cpu.attend import attend as attend_waiting
from disagg.kernels.cpu.encode import is_encoded, seal_pages
from disagg.kernels.formats import QuantFormat, RawFormat
from disagg.kernels.formats_paged import as_paged
from disagg.kernels.parts import Part, UnitPartials
from disagg.kernels.places import in_order
from disagg.kernels.sealing import Sealing, is_sealable


def attend_raw(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: RawFormat,
    base: int,
    heads: int,
    scale: float,
) -> Part:
    """Attention over raw pages: a part, for `merge`. See reference.attend_raw."""
    _check_attend(q, arena, pages, lo, hi, fmt, heads)
    if q.is_cuda:
        return _triton("paged_exact").attend_raw(q, arena, pages, lo, hi, fmt, base, heads, scale)
    if is_served(fmt, q):
        return Waiting(q, arena, pages, lo, hi, fmt, base, heads, scale)
    return reference.attend_raw(q, arena, pages, lo, hi, fmt, base, heads, scale)


def attend_quantized(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: QuantFormat,
    base: int,
    heads: int,
    scale: float,
) -> Part:
    """Attention on codes: a part, for `merge`. See reference.attend_quantized."""
    _check_attend(q, arena, pages, lo, hi, fmt, heads)
    if q.is_cuda:
        return _triton("paged_attention").attend_quantized(
            q, arena, pages, lo, hi, fmt, base, heads, scale
        )
    if is_served(as_paged(fmt), q):
        return Waiting(q, arena, pages, lo, hi, as_paged(fmt), base, heads, scale)
    return reference.attend_quantized(q, arena, pages, lo, hi, fmt, base, heads, scale)


def merge(parts: list[Part], dtype: torch.dtype | None = None) -> Tensor:
    """The answer of all parts, over disjoint tokens: [B, M, Hq, D]; one launch on a GPU.

    dtype: of the answer; that of the parts unless given. See parts.py and reference.merge
    """
    if not parts:
        raise ValueError("nothing to merge; at least one part is wanted")
    waiting = [part for part in parts if isinstance(part, Waiting)]
    pairs = [part for part in parts if not isinstance(part, UnitPartials | Waiting)]
    if len(waiting) + len(pairs) < len(parts) or (pairs and pairs[0][0].is_cuda):
        return _triton("reduce").merge(parts, dtype or torch.float32)
    if waiting:
        pairs.append(attend_waiting(waiting))
    o = pairs[0][0] if len(pairs) == 1 else reference.merge(pairs)
    return o if dtype is None else o.to(dtype)


def encode_quantized(k: Tensor, v: Tensor, fmt: QuantFormat) -> Tensor:
    """Seal pages: [n / T, H, block_bytes] u8. See reference_encode.encode_quantized."""
    if not (k.is_floating_point() and v.is_floating_point()):
        raise TypeError(f"k and v are {k.dtype} and {v.dtype}; a float dtype is wanted")
    if k.shape != v.shape or k.dim() != 3 or k.shape[2] != fmt.head_dim:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}; [H, n, {fmt.head_dim}] is wanted"
        )
    if k.shape[1] % fmt.tokens:
        raise ValueError(f"{k.shape[1]} tokens; a multiple of {fmt.tokens} is wanted")
    if k.is_cuda:
        return _triton("encode").encode_quantized(k, v, fmt)
    if not is_encoded(as_paged(fmt), k):
        return reference_encode.encode_quantized(k, v, fmt)
    count = k.shape[1] // fmt.tokens
    blocks = torch.empty(count, k.shape[0], fmt.block_bytes, dtype=torch.uint8)
    seal_pages(k, v, in_order(blocks), as_paged(fmt), fmt.tokens)
    return blocks


def decode_quantized(
    blocks: Tensor, fmt: QuantFormat, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """k', v' [..., T, D] of dtype, of blocks [..., block_bytes] u8; the reference everywhere."""
    _check_bytes(blocks, "blocks")
    if blocks.shape[-1] != fmt.block_bytes:
        raise ValueError(f"blocks of {blocks.shape[-1]} bytes; {fmt.block_bytes} are wanted")
    return reference_encode.decode_quantized(blocks, fmt, dtype)


def append(
    arena: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    slots: Tensor,
    raw: RawFormat,
    raw_base: int,
    sealing: Sealing | None = None,
) -> None:
    """Write one token per row into raw pages, and the pages that they complete; one launch on a
    GPU. See reference_append.append."""
    _check_bytes(arena, "arena")
    _check_ids(pages, (k.shape[0],), "pages", arena)
    _check_ids(slots, (k.shape[0],), "slots", arena)
    if sealing is not None:
        rows, fmt = sealing.rows, sealing.fmt
        if not is_sealable(fmt):
            raise ValueError(f"an append cannot seal pages of {fmt}")
        _check_ids(rows.tails, (k.shape[0], fmt.tokens // raw.tokens), "tails", arena)
        for name in ("pages", "segments", "stretches"):
            _check_ids(getattr(rows, name), (k.shape[0],), name, arena)
    dtype = getattr(torch, raw.dtype)
    if k.dtype != dtype or v.dtype != dtype:
        raise TypeError(f"k and v are {k.dtype} and {v.dtype}; the raw pages hold {dtype}")
    if k.shape != v.shape or k.dim() != 3 or k.shape[2] != raw.head_dim:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}; [N, H, {raw.head_dim}] is wanted"
        )
    run = _triton("append").append if arena.is_cuda else append_on_cpu
    run(arena, k, v, pages, slots, raw, raw_base, sealing)


def gather_raw(
    arena: Tensor, pages: Tensor, fmt: RawFormat, base: int, heads: int
) -> tuple[Tensor, Tensor]:
    """k, v [B, heads, P * T, D] of raw pages, by the reference on every device."""
    _check_bytes(arena, "arena")
    _check_ids(pages, tuple(pages.shape), "pages", arena)
    return reference_pages.gather_raw(arena, pages, fmt, base, heads)


def store_blocks(arena: Tensor, blocks: Tensor, pages: Tensor, base: int) -> None:
    """Copy blocks [P, H, block_bytes] to their pages, by the reference on every device."""
    _check_bytes(arena, "arena")
    _check_bytes(blocks, "blocks")
    _check_ids(pages, (blocks.shape[0],), "pages", arena)
    if pages.numel():
        reference_pages.store_blocks(arena, blocks, pages, base)


def load_blocks(arena: Tensor, pages: Tensor, base: int, heads: int, block_bytes: int) -> Tensor:
    """Blocks [P, heads, block_bytes] of pages, by the reference on every device."""
    _check_bytes(arena, "arena")
    _check_ids(pages, (pages.numel(),), "pages", arena)
    return reference_pages.load_blocks(arena, pages, base, heads, block_bytes)


@cache
def _triton(name: str) -> ModuleType:
    """The Triton module of this folder called `name`."""
    return import_module(f"disagg.kernels.{name}")


def _check_attend(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: RawFormat | QuantFormat,
    heads: int,
) -> None:
    exact = q.dtype == torch.float64 and not q.is_cuda  # the kernels compute in fp32
    if q.dtype != torch.float32 and not exact:
        raise TypeError(f"q is {q.dtype}; torch.float32 is wanted, or float64 on a CPU")
    if q.dim() != 4 or q.shape[3] != fmt.head_dim or q.shape[2] % heads:
        raise ValueError(
            f"q is {tuple(q.shape)}; [B, M, a multiple of {heads}, {fmt.head_dim}] is wanted"
        )
    if pages.dim() != 2 or not pages.shape[1]:
        raise ValueError(f"pages is {tuple(pages.shape)}; [B, at least one page] is wanted")
    _check_bytes(arena, "arena")
    _check_ids(pages, (q.shape[0], pages.shape[1]), "pages", q)
    _check_ids(lo, (q.shape[0], q.shape[1]), "lo", q)
    _check_ids(hi, (q.shape[0], q.shape[1]), "hi", q)
    if arena.device != q.device:
        raise ValueError(f"q is on {q.device} and the arena on {arena.device}")


def _check_bytes(x: Tensor, name: str) -> None:
    if x.dtype != torch.uint8:
        raise TypeError(f"{name} is {x.dtype}; torch.uint8 is wanted")
    if name == "arena" and (x.dim() != 1 or not x.is_contiguous() or x.data_ptr() % 16):
        raise ValueError("the arena is one contiguous run of bytes on a 16-byte boundary")


def _check_ids(x: Tensor, shape: tuple[int, ...], name: str, like: Tensor) -> None:
    if x.dtype != torch.int32:
        raise TypeError(f"{name} is {x.dtype}; torch.int32 is wanted")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} is {tuple(x.shape)}; {shape} is wanted")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}; {like.device} is wanted")
