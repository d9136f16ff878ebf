"""Pages made of pieces or of bit planes, as the other rooms call them: arguments checked first.

Shapes and units are stated in reference_paged.py and reference_encode_paged.py. A wrong dtype
raises TypeError, a wrong shape or device ValueError. On a GPU everything but `decode_paged` runs in
Triton where the kernels know the format; the rest is the torch reference.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from disagg.kernels import reference_aligned, reference_encode_paged, reference_paged
from disagg.kernels.cpu.attend import Waiting, is_served
from disagg.kernels.cpu.encode import is_encoded, seal_pages
from disagg.kernels.formats_aligned import AlignedFormat
from disagg.kernels.formats_paged import PagedFormat, is_encodable
from disagg.kernels.parts import Part
from disagg.kernels.places import in_order
from disagg.kernels.reference_aligned import Bits


def attend_paged(
    q: Tensor,
    arena: Tensor,
    pages: Tensor,
    lo: Tensor,
    hi: Tensor,
    fmt: PagedFormat,
    base: int,
    heads: int,
    scale: float,
    segments: Tensor | None = None,
    owner: Tensor | None = None,
    segment_base: int = 0,
) -> Part:
    """Attention on pieces: a part, for `ops.merge`. See reference_paged.attend_paged."""
    _check_attend(q, arena, pages, lo, hi, fmt.head_dim, heads)
    if fmt.segment_bytes and (segments is None or owner is None or owner.shape != pages.shape):
        raise ValueError("these pages share segments: segments [B, S] and owner [B, P] are wanted")
    for there in (segments, owner):
        if there is not None and there.device != q.device:
            raise ValueError(f"q is on {q.device}, another argument on {there.device}")
    run: Callable[..., Part] = reference_paged.attend_paged
    if q.dtype == torch.float32 and runs_on_gpu(fmt, q.device):
        run = import_module("disagg.kernels.paged_pieces").attend_paged
    elif is_served(fmt, q):
        run = Waiting
    return run(q, arena, pages, lo, hi, fmt, base, heads, scale, segments, owner, segment_base)


def runs_on_gpu(fmt: PagedFormat, device: torch.device) -> bool:
    """Whether `attend_paged` of fp32 queries is a Triton kernel, which a CUDA graph can hold."""
    if device.type != "cuda":
        return False
    return bool(import_module("disagg.kernels.paged_pieces").is_supported(fmt))


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
) -> tuple[Part, Bits]:
    """Attention on bit planes, and the bits read. See reference_aligned.attend_aligned."""
    _check_attend(q, arena, pages, lo, hi, fmt.head_dim, heads)
    run = reference_aligned.attend_aligned
    if q.is_cuda and q.dtype == torch.float32:
        run = import_module("disagg.kernels.paged_aligned").attend_aligned
    return run(q, arena, pages, lo, hi, fmt, base, heads, scale)


def encode_paged(
    k: Tensor, v: Tensor, fmt: PagedFormat, seed: int = 0, frozen: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Seal the pages of a segment: blocks [P, H, bytes], segment [H, bytes] or None."""
    blocks, segments = encode_segments(k, v, fmt, [seed], max(1, k.shape[1]), frozen)
    return blocks, None if segments is None else segments[0]


def encode_segments(
    k: Tensor,
    v: Tensor,
    fmt: PagedFormat,
    seeds: list[int],
    tokens: int,
    frozen: Tensor | None = None,
    absent: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Seal consecutive segments: blocks [P, H, bytes], segments [S, H, bytes] or None.

    See reference_encode_paged.encode_segments.
    """
    _check_encode(k, v, fmt.head_dim, fmt.tokens)
    check_absent(absent, k, fmt)
    if fmt.segment_bytes and len(seeds) != max(1, -(-k.shape[1] // tokens)):
        raise ValueError(f"{len(seeds)} seeds for {k.shape[1]} tokens in segments of {tokens}")
    run = reference_encode_paged.encode_segments
    if k.is_cuda and is_encodable(fmt):
        run = import_module("disagg.kernels.encode").encode_segments
    elif is_encoded(fmt, k) and absent is None:
        blocks = k.new_empty(
            k.shape[1] // fmt.tokens, k.shape[0], fmt.block_bytes, dtype=torch.uint8
        )
        return blocks, seal_pages(k, v, in_order(blocks), fmt, tokens)
    return run(k, v, fmt, seeds, tokens, frozen, absent)


def decode_paged(
    blocks: Tensor, segments: Tensor | None, fmt: PagedFormat, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """k', v' [..., tokens, D] of blocks [..., block_bytes] u8, and a segment for each."""
    if blocks.dtype != torch.uint8 or blocks.shape[-1] != fmt.block_bytes:
        raise ValueError(
            f"blocks are {tuple(blocks.shape)} {blocks.dtype}; [..., {fmt.block_bytes}] u8 wanted"
        )
    return reference_paged.decode_paged(blocks, segments, fmt, dtype)


def encode_aligned(k: Tensor, v: Tensor, fmt: AlignedFormat) -> Tensor:
    """Bit planes of pages: [n / T, H, block_bytes] u8. See reference_aligned.encode_aligned."""
    _check_encode(k, v, fmt.head_dim, fmt.tokens)
    if k.is_cuda:
        return import_module("disagg.kernels.encode_aligned").encode_aligned(k, v, fmt)
    return reference_aligned.encode_aligned(k, v, fmt)


def check_absent(absent: Tensor | None, k: Tensor, fmt: PagedFormat) -> None:
    """Refuse tokens left out of pages that cannot say so, and what is not a bool for each."""
    if absent is None:
        return
    if absent.dtype != torch.bool or absent.shape != k.shape[:2] or absent.device != k.device:
        raise ValueError(f"absent is {tuple(absent.shape)} {absent.dtype}; a bool for each token")
    if fmt.valid is None or fmt.k.scale.by != "column" or fmt.k.scale.shared:
        raise ValueError("pages without a mask, or without groups of tokens, leave no token out")


def _check_attend(
    q: Tensor, arena: Tensor, pages: Tensor, lo: Tensor, hi: Tensor, head_dim: int, heads: int
) -> None:
    if not q.is_floating_point() or arena.dtype != torch.uint8:
        raise TypeError(f"q is {q.dtype}, the arena {arena.dtype}; a float and u8 are wanted")
    if q.dim() != 4 or q.shape[3] != head_dim or q.shape[2] % heads:
        raise ValueError(
            f"q is {tuple(q.shape)}; [B, M, a multiple of {heads}, {head_dim}] is wanted"
        )
    if pages.dim() != 2 or not pages.shape[1] or pages.shape[0] != q.shape[0]:
        raise ValueError(f"pages is {tuple(pages.shape)}; [{q.shape[0]}, 1 or more] is wanted")
    for name, x, wanted in (("lo", lo, q.shape[:2]), ("hi", hi, q.shape[:2])):
        if x.shape != wanted:
            raise ValueError(f"{name} is {tuple(x.shape)}; {tuple(wanted)} is wanted")
    for there in (arena, pages, lo, hi):
        if there.device != q.device:
            raise ValueError(f"q is on {q.device}, another argument on {there.device}")


def _check_encode(k: Tensor, v: Tensor, head_dim: int, tokens: int) -> None:
    if not (k.is_floating_point() and v.is_floating_point()):
        raise TypeError(f"k and v are {k.dtype} and {v.dtype}; a float dtype is wanted")
    if k.shape != v.shape or k.dim() != 3 or k.shape[2] != head_dim:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}; [H, n, {head_dim}] is wanted"
        )
    if k.shape[1] % tokens:
        raise ValueError(f"{k.shape[1]} tokens; a multiple of {tokens} is wanted")
