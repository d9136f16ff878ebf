"""The kernels as the other rooms call them: arguments checked here, run by device.

What is on a GPU goes to Triton (gpu/), what is on a CPU to the C library (cpu/), where these know
the format and the library was built; all else to the torch reference, the spec of everything. A
wrong dtype raises TypeError, a wrong shape, device or memory order ValueError. No silent copies.

Triton is imported on the first call that needs it: a machine without a GPU starts faster, and runs
where there is no Triton at all.
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
from disagg.kernels.formats import RAW_SLOTS, AlignedFormat, ExactFormat, Format, PageFormat
from disagg.kernels.reference import aligned, codes, exact, kept, pages
from disagg.kernels.reference import encode as encoders
from disagg.kernels.reference.aligned import Bits
from disagg.kernels.reference.kept import KeptSlots
from disagg.kernels.reference.softmax import merge
from disagg.kernels.sealing import NewRows, Sealing, Segmentation, Target, in_order
from disagg.kernels.view import Partial, Softmax, Units, View

TRITON = "triton"


def attend(
    q: Tensor, views: Sequence[View], softmax: Softmax, units: Units | None = None
) -> Tensor:
    """The answer of all views, over disjoint tokens: [B, M, Hq, D] of the dtype of q.

    q:     [B, M, Hq, D] of any float dtype - query head i reads KV head i // (Hq / heads); what has
           fewer bits than fp32 is computed in that, and fp64 only on a CPU. One that sees nothing
           gets 0
    units: how a GPU attends to these views; None: it finds out, and asks the host for lengths
    error: 1e-5 relative by the reference in fp32, 1e-12 in fp64; 5e-4 over codes by the C library,
           and on a GPU, where q and p are rounded to 16 bits, more where scores differ by hundreds;
           against attention on what `decode` gives
    """
    if not views:
        raise ValueError("no views; at least one is wanted")
    for view in views:
        _check_view(q, view)
    dtype, scale, cap, sinks = q.dtype, softmax.scale, softmax.cap, softmax.sinks
    if on_gpu(q) and all(serves_gpu(view.fmt) for view in views):
        found = _gpu("attend").attend(q, views, scale, units, cap)
        answer: Tensor = _gpu("reduce").merge(found, dtype, sinks)[0]
        return answer
    q = q if q.dtype == torch.float64 else q.float()
    served = [view for view in views if cpu_attend.is_served(view.fmt, q)]
    rest = [view for view in views if not cpu_attend.is_served(view.fmt, q)]
    partials = [_attend_by_reference(q, view, scale, cap) for view in rest]
    if served:
        partials.append(cpu_attend.attend(q, served, scale, cap))
    alone = len(partials) == 1 and sinks is None
    o = partials[0][0] if alone else merge(partials, sinks)
    return o.to(dtype)


def prepare(arena: Tensor, rows: NewRows, views: Sequence[View], q: Tensor) -> LayerCalls | None:
    """A step of one token for each of B sequences, ready for every layer of a group; None where
    other code than the C library has to serve it, layer by layer.

    rows, views: in the first layer; q: [B, 1, Hq, D], like that of every layer
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
        return aligned.attend(q, view, scale)[1]
    units = _gpu("plan").units_of([view], q.device)
    o = q.new_empty(units.table.shape[0], q.shape[1] * q.shape[2], q.shape[3], dtype=torch.float32)
    count = _gpu("aligned").attend(q, view, scale, 0, units, o, torch.empty_like(o[..., 0]))
    found: Bits = count()
    return found


def serves_gpu(fmt: Format) -> bool:
    """Whether a GPU attends to such pages by kernels, which a CUDA graph can hold."""
    return not isinstance(fmt, PageFormat) or bool(_gpu("plan").is_supported(fmt))


def attends_by(formats: Sequence[Format], q: Tensor) -> str:
    """What attends to pages of these formats: Triton, a path of the C library, torch, or two."""
    if on_gpu(q):
        return TRITON if all(map(serves_gpu, formats)) else TORCH
    served = (backend() if cpu_attend.is_served(fmt, q) else TORCH for fmt in formats)
    return " + ".join(dict.fromkeys(served))


def encodes_by(fmt: Format, k: Tensor) -> str:
    """What seals pages of this format."""
    if not isinstance(fmt, PageFormat):
        return TORCH
    if on_gpu(k):
        return TRITON if fmt.is_encodable else TORCH
    return backend() if cpu_encode.is_encoded(fmt, k) else TORCH


def appends_by(device: torch.device) -> str:
    """What writes new tokens into raw pages."""
    return TRITON if device.type == "cuda" else backend()


def encode(
    k: Tensor,
    v: Tensor,
    fmt: PageFormat | AlignedFormat,
    cut: Segmentation | None = None,
    absent: Tensor | None = None,
    target: Target | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Seal pages: blocks [P, H, block_bytes], segments [S, H, segment_bytes] or None.

    target: where the blocks belong; None are returned then
    See reference/encode.py; a GPU writes the same bytes, but where sums in another order tip a
    rounding, and A B^T is off by 2**-9 of it.
    """
    cut = cut or Segmentation()
    _check_encode(k, v, fmt, absent)
    if target is not None:
        _check_bytes(target.arena, "arena")
        _check_ids(target.pages, (k.shape[1] // fmt.tokens,), "pages", k)
    segments: Tensor | None = None
    if isinstance(fmt, AlignedFormat):
        blocks = aligned.encode(k, v, fmt)
    elif on_gpu(k) and fmt.is_encodable:
        found: tuple[Tensor, Tensor | None] = _gpu("encode").encode(k, v, fmt, cut, absent, target)
        return found
    elif absent is None and cpu_encode.is_encoded(fmt, k):
        shape = (0 if target else k.shape[1] // fmt.tokens, k.shape[0], fmt.block_bytes)
        blocks = k.new_empty(shape, dtype=torch.uint8)
        return blocks, cpu_encode.seal_pages(k, v, target or in_order(blocks), fmt, cut)
    else:
        blocks, segments = encoders.encode(k, v, fmt, cut, absent)
    if target is None:
        return blocks, segments
    pages.store_blocks(target, blocks)
    return blocks[:0], segments


def decode(
    blocks: Tensor, segments: Tensor | None, fmt: PageFormat, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """k', v' [..., tokens, D] of blocks [..., block_bytes] u8, and a segment for each."""
    _check_bytes(blocks, "blocks")
    if blocks.shape[-1] != fmt.block_bytes:
        raise ValueError(f"blocks of {blocks.shape[-1]} bytes; {fmt.block_bytes} are wanted")
    return codes.decode(blocks, segments, fmt, dtype)


def append(
    arena: Tensor, k: Tensor, v: Tensor, rows: NewRows, sealing: Sealing | None = None
) -> None:
    """Write one token per row, k and v [N, H, D], into raw pages, and the pages that they complete;
    one launch on a GPU. What the raw dtype cannot hold saturates. See reference/encode.py."""
    _check_rows(arena, rows, k.shape[0])
    if sealing is not None:
        fmt, tables = sealing.fmt, sealing.rows
        if not fmt.is_sealable:
            raise ValueError(f"an append cannot seal pages of {fmt}")
        _check_ids(tables.tails, (k.shape[0], fmt.tokens // rows.fmt.tokens), "tails", arena)
        for name in ("pages", "segments", "stretches"):
            _check_ids(getattr(tables, name), (k.shape[0],), name, arena)
    if not k.is_floating_point() or k.dtype != v.dtype:
        raise TypeError(f"k and v are {k.dtype} and {v.dtype}; one float dtype is wanted")
    if k.shape != v.shape or k.dim() != 3 or k.shape[2] != rows.fmt.head_dim:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}; [N, H, {rows.fmt.head_dim}] is wanted"
        )
    if on_gpu(arena):
        _gpu("append").append(arena, k, v, rows, sealing)
    else:
        cpu_append.append(arena, k, v, rows, sealing)


def sum_squares(q: Tensor, heads: int, begun: int) -> Tensor:
    """Sums of squares of q [Hq, n, D] by KV heads and units of tokens. See reference/encode.py."""
    if q.dim() != 3 or q.shape[0] % heads or not 0 <= begun < RAW_SLOTS:
        wanted = f"[a multiple of {heads}, n, D] behind 0 to {RAW_SLOTS - 1} is wanted"
        raise ValueError(f"q is {tuple(q.shape)} behind {begun} tokens of a unit; {wanted}")
    where = encoders if on_gpu(q) else cpu_encode
    return where.sum_squares(q, heads, begun)


def keep_outliers(slots: KeptSlots, k: Tensor, v: Tensor, count: int, first: int) -> Tensor:
    """Let new tokens compete and keep the winners: [H, n] bool. See reference/kept.py."""
    if k.shape != v.shape or k.dim() != 3 or k.dtype != v.dtype or not k.is_floating_point():
        raise ValueError(f"k is {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype}")
    return kept.keep_outliers(slots, k, v, count, first)


def gather_raw(
    arena: Tensor, ids: Tensor, fmt: ExactFormat, base: int, heads: int
) -> tuple[Tensor, Tensor]:
    """k, v [B, heads, P * T, D] of raw pages [B, P]."""
    _check_bytes(arena, "arena")
    _check_ids(ids, tuple(ids.shape), "pages", arena)
    return pages.gather_raw(arena, ids, fmt, base, heads)


def store_blocks(target: Target, blocks: Tensor) -> None:
    """Copy blocks [P, H, block_bytes] to their pages."""
    _check_bytes(target.arena, "arena")
    _check_bytes(blocks, "blocks")
    _check_ids(target.pages, (blocks.shape[0],), "pages", target.arena)
    pages.store_blocks(target, blocks)


def load_blocks(arena: Tensor, ids: Tensor, base: int, heads: int, block_bytes: int) -> Tensor:
    """Blocks [P, heads, block_bytes] of pages [P]."""
    _check_bytes(arena, "arena")
    _check_ids(ids, (ids.numel(),), "pages", arena)
    return pages.load_blocks(arena, ids, base, heads, block_bytes)


def on_gpu(x: Tensor) -> bool:
    """Whether Triton computes what is asked of this tensor."""
    return x.is_cuda


@cache
def _gpu(name: str) -> ModuleType:
    """The Triton module called `name`; `plan` knows no Triton."""
    if name != "plan":
        import_module("disagg.kernels.gpu.keys").settle()
    return import_module(f"disagg.kernels.gpu.{name}")


def _attend_by_reference(q: Tensor, view: View, scale: float, cap: float) -> Partial:
    if isinstance(view.fmt, AlignedFormat):
        return aligned.attend(q, view, scale, cap)[0]
    return (exact if isinstance(view.fmt, ExactFormat) else codes).attend(q, view, scale, cap)


def _check_view(q: Tensor, view: View) -> None:
    fmt, ids = view.fmt, view.pages
    if not q.is_floating_point() or (q.dtype == torch.float64 and q.is_cuda):
        raise TypeError(f"q is {q.dtype}; floats of 32 bits at most are wanted, or 64 on a CPU")
    if q.dim() != 4 or q.shape[3] != fmt.head_dim or q.shape[2] % view.heads:
        raise ValueError(
            f"q is {tuple(q.shape)}; [B, M, a multiple of {view.heads}, {fmt.head_dim}] is wanted"
        )
    if ids.dim() != 2 or not ids.shape[1]:
        raise ValueError(f"pages is {tuple(ids.shape)}; [B, at least one page] is wanted")
    _check_bytes(view.arena, "arena")
    _check_ids(ids, (q.shape[0], ids.shape[1]), "pages", q)
    _check_ids(view.lo, (q.shape[0], q.shape[1]), "lo", q)
    _check_ids(view.hi, (q.shape[0], q.shape[1]), "hi", q)
    if view.arena.device != q.device:
        raise ValueError(f"q is on {q.device} and the arena on {view.arena.device}")
    if isinstance(fmt, PageFormat) and fmt.segment_bytes:
        if view.segments is None or view.owner is None:
            raise ValueError("these pages share segments: segments and owner are wanted")
        _check_ids(view.owner, tuple(ids.shape), "owner", q)
        _check_ids(view.segments, (q.shape[0], view.segments.shape[1]), "segments", q)
    if isinstance(fmt, ExactFormat) and fmt.side is not None:
        if view.sides is None:
            raise ValueError("these slots have side records: sides is wanted")
        _check_ids(view.sides, (q.shape[0],), "sides", q)


def _check_rows(arena: Tensor, rows: NewRows, count: int) -> None:
    _check_bytes(arena, "arena")
    for name in ("pages", "slots"):
        _check_ids(getattr(rows, name), (count,), name, arena)


def _check_encode(
    k: Tensor, v: Tensor, fmt: PageFormat | AlignedFormat, absent: Tensor | None
) -> None:
    if not (k.is_floating_point() and v.is_floating_point()):
        raise TypeError(f"k and v are {k.dtype} and {v.dtype}; a float dtype is wanted")
    if k.shape != v.shape or k.dim() != 3 or k.shape[2] != fmt.head_dim or v.device != k.device:
        raise ValueError(
            f"k is {tuple(k.shape)} and v {tuple(v.shape)}; [H, n, {fmt.head_dim}] is wanted"
        )
    if k.shape[1] % fmt.tokens:
        raise ValueError(f"{k.shape[1]} tokens; a multiple of {fmt.tokens} is wanted")
    if absent is None:
        return
    if absent.dtype != torch.bool or absent.shape != k.shape[:2] or absent.device != k.device:
        raise ValueError(f"absent is {tuple(absent.shape)} {absent.dtype}; a bool for each token")
    masked = isinstance(fmt, PageFormat) and fmt.valid is not None
    if not masked or fmt.k.scale.by != "column" or fmt.k.scale.shared:  # type: ignore[union-attr]
        raise ValueError("pages without a mask, or without groups of tokens, leave no token out")


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
