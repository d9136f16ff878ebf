"""Attention on exact K and V in plain torch: raw pages, tails, outliers and heavy hitters."""

import torch
from torch import Tensor

from disagg.kernels.formats import FREE, ExactFormat, SlotsFormat
from disagg.kernels.reference.pages import ArenaBlocks, gather_raw
from disagg.kernels.reference.softmax import (
    columns_of,
    masked_softmax,
    partial_of,
    visible_at,
    visible_pages,
    visible_tokens,
)
from disagg.kernels.view import Partial, View


def attend(
    q: Tensor,
    view: View,
    scale: float,
    cap: float = 0.0,
) -> Partial:
    """Attention over slots of exact K and V; for the token of each slot see `ExactFormat`.

    q:       [B, M, Hq, D] fp32 or fp64 - query head i reads KV head i // (Hq / heads)
    scale, cap: as in `Softmax`
    returns: o [B, M, Hq, D], lse [B, M, Hq] of the dtype of q - the natural log of
             sum exp(score); a query that sees nothing has o = 0 and lse = -inf
    """
    k, v, visible = _read_slots(view)  # [B, H, n, D] twice, [B, 1 or H, n, M]
    queries = columns_of(q * scale, view.heads)  # [B, H, D, N]
    scores = k.to(q.dtype) @ queries  # [B, H, n, N]
    p, lse = masked_softmax(scores, visible, cap)
    o = v.to(q.dtype).transpose(2, 3) @ p  # [B, H, D or latent, N]
    return partial_of(o, lse, q.shape[1])


def _read_slots(view: View) -> tuple[Tensor, Tensor, Tensor]:
    """k, v [B, H, n, D] of the slots of a view, and whether each query sees them [B, _, n, M]."""
    fmt = view.fmt
    assert isinstance(fmt, ExactFormat)
    if fmt.counted:
        first, last = visible_pages(view, fmt.tokens)
        pages = view.pages[:, first:last]
        k, v = gather_raw(view.arena, pages, fmt, view.base, view.heads)
        return k, v, visible_tokens(view, first * fmt.tokens, k.shape[2])
    k, v = gather_raw(view.arena, view.pages, fmt, view.base, view.heads)
    if fmt.side is None:
        return k, v, _visible_by_page_positions(view, fmt)
    k = k[:, :, : fmt.side.slots]
    v = v[:, :, : fmt.side.slots]
    return k, v, _visible_by_side_record(view, fmt.side, k.shape[2])


def _visible_by_side_record(
    view: View,
    side: SlotsFormat,
    slots: int,
) -> Tensor:
    """[B, H, slots, M] bool: which slots each query sees, by the positions in side records."""
    assert view.sides is not None
    records = ArenaBlocks(
        arena=view.arena,
        ids=view.sides.unsqueeze(1),
        base=view.side_base,
        heads=view.heads,
        block_bytes=side.block_bytes,
    )
    shape = (1, side.slots)
    positions = records.plane(torch.int32, side.positions, shape)[:, :, 0, 0, :slots]
    states = records.plane(torch.uint8, side.states, shape)[:, :, 0, 0, :slots]
    is_used = states != FREE
    return visible_at(view, positions) & is_used.unsqueeze(3)


def _visible_by_page_positions(view: View, fmt: ExactFormat) -> Tensor:
    """[B, H, P * slots, M] bool: which slots each query sees, by the positions in the pages.

    A short row of the page table is padded with other pages of its sequence; these do not count.
    """
    assert fmt.positions is not None
    blocks = ArenaBlocks(view.arena, view.pages, view.base, view.heads, fmt.block_bytes)
    by_page = blocks.plane(torch.int32, fmt.positions, (fmt.slots, 1))
    positions = by_page.flatten(2)  # [B, H, P * slots]
    columns = torch.arange(view.pages.shape[1], device=positions.device)
    first_tokens = (columns * fmt.tokens).repeat_interleave(fmt.slots)  # [P * slots]
    is_covered = first_tokens[:, None] < view.hi[:, None, None]
    return visible_at(view, positions) & is_covered
