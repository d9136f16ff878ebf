"""A step's new tokens on a CPU, and the pages that they complete: reference_append.py is the spec.

Tokens are copied by the C library; a page that it can encode goes from the tail to its place.
"""

from torch import Tensor

from disagg.kernels import reference_append
from disagg.kernels.cpu.encode import is_encoded, seal_pages
from disagg.kernels.cpu.library import TORCH, AppendC, address, backend, call
from disagg.kernels.formats import RawFormat
from disagg.kernels.formats_paged import PagedFormat
from disagg.kernels.places import Places
from disagg.kernels.reference_pages import gather_raw, store_blocks
from disagg.kernels.sealing import Sealing


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
    """As `reference_append.append`, to the byte."""
    if backend() == TORCH:
        reference_append.append(arena, k, v, pages, slots, raw, raw_base, sealing)
        return
    _append_raw(arena, k, v, pages, slots, raw, raw_base)
    if sealing is not None:
        for row, page in enumerate(sealing.rows.pages.tolist()):
            if page >= 0:
                _seal(arena, row, k.shape[1], raw, raw_base, sealing)


def _append_raw(
    arena: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    slots: Tensor,
    raw: RawFormat,
    base: int,
) -> None:
    size = k.element_size()
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    held = pages.contiguous(), slots.contiguous()
    strides = (size * x.stride(i) for x in (k, v) for i in (0, 1))
    tensors = map(address, (arena, k, v, *held))
    sizes = (size * raw.head_dim, raw.block_bytes, base + raw.k, base + raw.v)
    call("disagg_append", AppendC(*tensors, k.shape[0], k.shape[1], *strides, *sizes))


def _seal(
    arena: Tensor, row: int, heads: int, raw: RawFormat, raw_base: int, sealing: Sealing
) -> None:
    """Write the page that one row completes."""
    rows, fmt, one = sealing.rows, sealing.fmt, slice(row, row + 1)
    k, v = (x[0] for x in gather_raw(arena, rows.tails[one], raw, raw_base, heads))
    if isinstance(fmt, PagedFormat) and is_encoded(fmt, k):
        segment = seal_pages(k, v, Places(arena, rows.pages[one], sealing.base), fmt, fmt.tokens)
    else:
        seed = sealing.seed + int(rows.stretches[row])
        block, segment = reference_append.seal_page(k, v, fmt, seed)
        store_blocks(arena, block, rows.pages[one], sealing.base)
    if segment is not None:
        store_blocks(arena, segment, rows.segments[one], sealing.segment_base)
