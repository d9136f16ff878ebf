"""The kernels as the package calls them: arguments are checked here, then dispatched by device.

Tensors on a GPU go to Triton (gpu/). Tensors on a CPU go to the C library (cpu/) if it was built
and supports the format. The torch reference, the spec of everything, does the rest. A wrong dtype
raises TypeError; a wrong shape, device or memory order raises ValueError. Nothing is copied
silently.

Triton is imported on the first call that needs it, so a machine without a GPU starts faster and
does not need Triton at all.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from disagg.kernels.cpu import append as cpu_append
from disagg.kernels.cpu import attend as cpu_attend
from disagg.kernels.cpu import encode as cpu_encode
from disagg.kernels.cpu.library import TORCH, TYPES, backend
from disagg.kernels.cpu.step import LayerCalls
from disagg.kernels.formats import (
    RAW_SLOTS,
    AlignedFormat,
    ExactFormat,
    Format,
    PageFormat,
    latent_of,
)
from disagg.kernels.reference import aligned, codes, exact, kept, pages
from disagg.kernels.reference import encode as encoders
from disagg.kernels.reference.aligned import Bits
from disagg.kernels.reference.kept import KeptSlots
from disagg.kernels.reference.softmax import merge
from disagg.kernels.sealing import NewRows, Sealing, Segmentation, Target, in_order
from disagg.kernels.view import Partial, Softmax, View, WorkPlan

TRITON = "triton"


def attend(
    q: Tensor,
    views: Sequence[View],
    softmax: Softmax,
    units: WorkPlan | None = None,
) -> Tensor:
    """Attention over all views, which hold disjoint tokens: [B, M, Hq, D] of the dtype of q.

    Over latents it is [B, M, Hq, latent]: V is these channels of K.

    q:     [B, M, Hq, D] of any float dtype - query head i reads KV head i // (Hq / heads). Dtypes
           of fewer bits than fp32 are computed in fp32, fp64 only on a CPU. A query that sees
           nothing gets 0
    units: how a GPU divides the work on these views; None: it makes a plan, which asks the host
           for lengths
    error: relative, against attention on what `decode` gives: 1e-5 by the reference in fp32, 1e-12
           in fp64; over codes 5e-4 by the C library, and on a GPU, where q and p are rounded to 16
           bits, more where scores differ by hundreds
    """
    if not views:
        raise ValueError("no views; expected at least one")
    for view in views:
        _check_view(q, view)
    if on_gpu(q) and all(serves_gpu(view.fmt, q.device) for view in views):
        partial = _gpu("attend").attend(q, views, softmax.scale, units, softmax.cap)
        merged = _gpu("combine").merge(partial, q.dtype, softmax.sinks)
        o: Tensor = merged[0]
        return o
    return _attend_on_cpu(q, views, softmax).to(q.dtype)


def prepare(
    arena: Tensor,
    rows: NewRows,
    views: Sequence[View],
    q: Tensor,
) -> LayerCalls | None:
    """A step of one token for each of B sequences, ready for every layer of a group.

    None where the C library cannot serve it; `append` and `attend` do it layer by layer then.

    rows, views: in the first layer
    q:           [B, 1, Hq, D], like that of every layer
    """
    if on_gpu(q) or q.dtype not in TYPES:
        return None
    if not all(cpu_attend.is_served(view.fmt, q.float()) for view in views):
        return None
    _check_rows(arena, rows, q.shape[0])
    for view in views:
        _check_view(q, view)
    return LayerCalls(arena, rows, views)


def bits_read(q: Tensor, view: View, scale: float) -> Bits:
    """How many bits of K and V every query head reads of bit planes, on the mean."""
    _check_view(q, view)
    if not on_gpu(q):
        _, bits = aligned.attend(q, view, scale)
        return bits
    units = _gpu("plan").units_of([view], q.device)
    num_units = units.table.shape[0]
    num_queries = q.shape[1] * q.shape[2]
    o = q.new_empty(num_units, num_queries, q.shape[3], dtype=torch.float32)
    lse = torch.empty_like(o[..., 0])
    count = _gpu("aligned").attend(q, view, scale, 0, units, o, lse)
    counted: Bits = count()
    return counted


def serves_gpu(fmt: Format, device: torch.device | None = None) -> bool:
    """Whether a GPU attends to such pages by kernels, which a CUDA graph can hold.

    device: None: some GPU does
    """
    return bool(_gpu("plan").is_supported(fmt, device))


def attends_by(formats: Sequence[Format], q: Tensor) -> str:
    """What attends to pages of these formats: Triton, a path of the C library, torch, or two."""
    if on_gpu(q):
        return TRITON if all(serves_gpu(fmt, q.device) for fmt in formats) else TORCH
    names = [backend() if cpu_attend.is_served(fmt, q) else TORCH for fmt in formats]
    unique = dict.fromkeys(names)
    return " + ".join(unique)


def encodes_by(fmt: Format, k: Tensor) -> str:
    """What seals pages of this format."""
    if not isinstance(fmt, PageFormat):
        return TORCH
    if on_gpu(k):
        return TRITON if _seals_on_gpu(fmt, k) else TORCH
    return backend() if cpu_encode.is_encoded(fmt, k) else TORCH


def _seals_on_gpu(fmt: PageFormat, k: Tensor) -> bool:
    return on_gpu(k) and fmt.is_encodable


def appends_by(device: torch.device) -> str:
    """What writes new tokens into raw pages."""
    return TRITON if device.type == "cuda" else backend()


def encode(
    k: Tensor,
    v: Tensor | None,
    fmt: PageFormat | AlignedFormat,
    cut: Segmentation | None = None,
    absent: Tensor | None = None,
    target: Target | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Seal pages: blocks [P, H, block_bytes], segments [S, H, segment_bytes] or None.

    See reference/encode.py. A GPU writes the same bytes, except where sums in another order tip a
    rounding, and A B^T is off by 2**-9 of it.

    v:      None where the pages hold a latent
    target: where the blocks belong; the blocks returned are empty then
    """
    cut = cut or Segmentation()
    _check_encode(k, v, fmt, absent)
    num_pages = k.shape[1] // fmt.tokens
    if target is not None:
        _check_bytes(target.arena, "arena")
        _check_ids(target.pages, (num_pages,), "pages", k)
    segments: Tensor | None = None
    if isinstance(fmt, AlignedFormat):
        assert v is not None
        blocks = aligned.encode(k, v, fmt)
    elif _seals_on_gpu(fmt, k):
        blocks, segments = _gpu("encode").encode(k, v, fmt, cut, absent, target)
        return blocks, segments
    elif absent is None and cpu_encode.is_encoded(fmt, k):
        num_blocks = 0 if target else num_pages
        shape = (num_blocks, k.shape[0], fmt.block_bytes)
        blocks = k.new_empty(shape, dtype=torch.uint8)
        home = target or in_order(blocks)
        return blocks, cpu_encode.seal_pages(k, v, home, fmt, cut)
    else:
        blocks, segments = encoders.encode(k, v, fmt, cut, absent)
    if target is None:
        return blocks, segments
    pages.store_blocks(target, blocks)
    return blocks[:0], segments


def decode(
    blocks: Tensor,
    segments: Tensor | None,
    fmt: PageFormat,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """k', v' [..., tokens, D] of blocks [..., block_bytes] u8, and a segment for each.

    Of latents, v' is their channels of k'.
    """
    _check_bytes(blocks, "blocks")
    if blocks.shape[-1] != fmt.block_bytes:
        raise ValueError(
            f"blocks of {blocks.shape[-1]} bytes; expected {fmt.block_bytes}"
        )
    return codes.decode(blocks, segments, fmt, dtype)


def append(
    arena: Tensor,
    k: Tensor,
    v: Tensor | None,
    rows: NewRows,
    sealing: Sealing | None = None,
) -> None:
    """Write one token per row into raw pages, then the pages that they complete.

    One launch on a GPU. What the raw dtype cannot hold saturates. See reference/encode.py.

    k, v: [N, H, D]; v is None where the pages hold a latent
    """
    _check_rows(arena, rows, k.shape[0])
    if sealing is not None:
        _check_sealing(arena, rows, sealing, k.shape[0])
    _check_values(v, rows.fmt)
    like = k if v is None else v
    if not k.is_floating_point() or k.dtype != like.dtype:
        raise TypeError(
            f"k and v are {k.dtype} and {like.dtype}; expected one float dtype"
        )
    if k.shape != like.shape or k.dim() != 3 or k.shape[2] != rows.fmt.head_dim:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(like.shape)}; "
            f"expected [N, H, {rows.fmt.head_dim}]"
        )
    if on_gpu(arena):
        _gpu("append").append(arena, k, v, rows, sealing)
    else:
        cpu_append.append(arena, k, v, rows, sealing)


def sum_squares(q: Tensor, heads: int, begun: int) -> Tensor:
    """Sums of squares of q [Hq, n, D] by KV heads and units of tokens. See reference/encode.py."""
    if q.dim() != 3 or q.shape[0] % heads or not 0 <= begun < RAW_SLOTS:
        raise ValueError(
            f"q is {tuple(q.shape)} behind {begun} tokens of a unit; expected "
            f"[a multiple of {heads}, n, D] behind 0 to {RAW_SLOTS - 1}"
        )
    if on_gpu(q):
        return encoders.sum_squares(q, heads, begun)
    return cpu_encode.sum_squares(q, heads, begun)


def keep_outliers(
    slots: KeptSlots,
    k: Tensor,
    v: Tensor,
    count: int,
    first: int,
) -> Tensor:
    """Let new tokens compete and keep the winners: [H, n] bool. See reference/kept.py."""
    is_float = k.is_floating_point() and k.dtype == v.dtype
    if not is_float or k.dim() != 3 or k.shape != v.shape:
        raise ValueError(
            f"k is {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype}"
        )
    return kept.keep_outliers(slots, k, v, count, first)


def gather_raw(
    arena: Tensor, ids: Tensor, fmt: ExactFormat, base: int, heads: int
) -> tuple[Tensor, Tensor]:
    """k, v [B, heads, P * T, D] of raw pages [B, P]; of latents, v is their channels of k."""
    _check_bytes(arena, "arena")
    _check_ids(ids, tuple(ids.shape), "pages", arena)
    return pages.gather_raw(arena, ids, fmt, base, heads)


def store_blocks(target: Target, blocks: Tensor) -> None:
    """Copy blocks [P, H, block_bytes] to their pages."""
    _check_bytes(target.arena, "arena")
    _check_bytes(blocks, "blocks")
    _check_ids(target.pages, (blocks.shape[0],), "pages", target.arena)
    pages.store_blocks(target, blocks)


def load_blocks(
    arena: Tensor, ids: Tensor, base: int, heads: int, block_bytes: int
) -> Tensor:
    """Blocks [P, heads, block_bytes] of pages [P]."""
    _check_bytes(arena, "arena")
    _check_ids(ids, (ids.numel(),), "pages", arena)
    return pages.load_blocks(arena, ids, base, heads, block_bytes)


def on_gpu(x: Tensor) -> bool:
    """Whether Triton computes on this tensor."""
    return x.is_cuda


@cache
def _gpu(name: str) -> ModuleType:
    """The Triton module called `name`; `plan` knows no Triton."""
    if name != "plan":
        import_module("disagg.kernels.gpu.keys").settle()
    return import_module(f"disagg.kernels.gpu.{name}")


def _attend_on_cpu(q: Tensor, views: Sequence[View], softmax: Softmax) -> Tensor:
    """`attend` by the C library for the views that it serves, by the reference for the others."""
    if q.dtype != torch.float64:
        q = q.float()
    served = [view for view in views if cpu_attend.is_served(view.fmt, q)]
    others = [view for view in views if not cpu_attend.is_served(view.fmt, q)]
    partials = [_attend_by_reference(q, view, softmax) for view in others]
    if served:
        partials.append(cpu_attend.attend(q, served, softmax.scale, softmax.cap))
    if len(partials) == 1 and softmax.sinks is None:
        o, _ = partials[0]
        return o
    return merge(partials, softmax.sinks)


def _attend_by_reference(q: Tensor, view: View, softmax: Softmax) -> Partial:
    if isinstance(view.fmt, AlignedFormat):
        partial, _ = aligned.attend(q, view, softmax.scale, softmax.cap)
        return partial
    if isinstance(view.fmt, ExactFormat):
        return exact.attend(q, view, softmax.scale, softmax.cap)
    return codes.attend(q, view, softmax.scale, softmax.cap)


def _check_view(q: Tensor, view: View) -> None:
    ids = view.pages
    _check_queries(q, view)
    if ids.dim() != 2 or not ids.shape[1]:
        raise ValueError(
            f"pages is {tuple(ids.shape)}; expected [B, at least one page]"
        )
    _check_bytes(view.arena, "arena")
    _check_ids(ids, (q.shape[0], ids.shape[1]), "pages", q)
    _check_ids(view.lo, (q.shape[0], q.shape[1]), "lo", q)
    _check_ids(view.hi, (q.shape[0], q.shape[1]), "hi", q)
    if view.arena.device != q.device:
        raise ValueError(f"q is on {q.device} and the arena on {view.arena.device}")
    if isinstance(view.fmt, PageFormat) and view.fmt.segment_bytes:
        if view.segments is None or view.owner is None:
            raise ValueError("these pages share segments: expected segments and owner")
        _check_ids(view.owner, tuple(ids.shape), "owner", q)
        _check_ids(view.segments, (q.shape[0], view.segments.shape[1]), "segments", q)
    if isinstance(view.fmt, ExactFormat) and view.fmt.side is not None:
        if view.sides is None:
            raise ValueError("these slots have side records: expected sides")
        _check_ids(view.sides, (q.shape[0],), "sides", q)


def _check_queries(q: Tensor, view: View) -> None:
    head_dim = view.fmt.head_dim
    if not q.is_floating_point() or (q.dtype == torch.float64 and q.is_cuda):
        raise TypeError(
            f"q is {q.dtype}; expected floats of 32 bits at most, or 64 on a CPU"
        )
    if q.dim() != 4 or q.shape[3] != head_dim or q.shape[2] % view.heads:
        raise ValueError(
            f"q is {tuple(q.shape)}; "
            f"expected [B, M, a multiple of {view.heads}, {head_dim}]"
        )


def _check_sealing(arena: Tensor, rows: NewRows, sealing: Sealing, count: int) -> None:
    fmt = sealing.fmt
    tables = sealing.rows
    if not fmt.is_sealable:
        raise ValueError(f"an append cannot seal pages of {fmt}")
    tail_pages = fmt.tokens // rows.fmt.tokens
    _check_ids(tables.tails, (count, tail_pages), "tails", arena)
    _check_ids(tables.pages, (count,), "pages", arena)
    _check_ids(tables.segments, (count,), "segments", arena)
    _check_ids(tables.stretches, (count,), "stretches", arena)


def _check_rows(arena: Tensor, rows: NewRows, count: int) -> None:
    _check_bytes(arena, "arena")
    _check_ids(rows.pages, (count,), "pages", arena)
    _check_ids(rows.slots, (count,), "slots", arena)


def _check_encode(
    k: Tensor,
    v: Tensor | None,
    fmt: PageFormat | AlignedFormat,
    absent: Tensor | None,
) -> None:
    _check_values(v, fmt)
    like = k if v is None else v
    if not (k.is_floating_point() and like.is_floating_point()):
        raise TypeError(
            f"k and v are {k.dtype} and {like.dtype}; expected a float dtype"
        )
    are_alike = k.shape == like.shape and k.device == like.device
    if not are_alike or k.dim() != 3 or k.shape[2] != fmt.head_dim:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(like.shape)}; "
            f"expected [H, n, {fmt.head_dim}]"
        )
    if k.shape[1] % fmt.tokens:
        raise ValueError(f"{k.shape[1]} tokens; expected a multiple of {fmt.tokens}")
    if absent is not None:
        _check_absent(absent, k, fmt)


def _check_values(v: Tensor | None, fmt: Format) -> None:
    latent = latent_of(fmt)
    if (v is None) == (latent is None):
        held = "hold no V" if v is not None else "hold V"
        raise ValueError(
            f"these pages {held}; expected v to be a tensor only if they do"
        )


def _check_absent(
    absent: Tensor,
    k: Tensor,
    fmt: PageFormat | AlignedFormat,
) -> None:
    is_like_k = absent.shape == k.shape[:2] and absent.device == k.device
    if absent.dtype != torch.bool or not is_like_k:
        raise ValueError(
            f"absent is {tuple(absent.shape)} {absent.dtype}; expected a bool for each token"
        )
    if isinstance(fmt, PageFormat) and fmt.valid is not None:
        scale = fmt.k.scale
        if scale.by == "column" and not scale.shared:
            return
    raise ValueError(
        "pages without a mask, or without groups of tokens, leave no token out"
    )


def _check_bytes(x: Tensor, name: str) -> None:
    if x.dtype != torch.uint8:
        raise TypeError(f"{name} is {x.dtype}; expected torch.uint8")
    if name == "arena" and (x.dim() != 1 or not x.is_contiguous() or x.data_ptr() % 16):
        raise ValueError(
            "the arena is one contiguous run of bytes on a 16-byte boundary"
        )


def _check_ids(x: Tensor, shape: tuple[int, ...], name: str, like: Tensor) -> None:
    if x.dtype != torch.int32:
        raise TypeError(f"{name} is {x.dtype}; expected torch.int32")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} is {tuple(x.shape)}; expected {shape}")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}; expected {like.device}")
