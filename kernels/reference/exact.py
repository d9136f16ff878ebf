"""Attention on exact K and V in plain torch: raw pages, tails, tokens kept and not dropped."""

import torch
from torch import Tensor

from disagg.kernels.formats import FREE, ExactFormat, SlotsFormat
from disagg.kernels.reference.pages import ArenaBlocks, gather_raw
from disagg.kernels.reference.softmax import (
    columns_of,
    masked_softmax,
    partial_of,
    seen_at,
    seen_tokens,
    visible_pages,
)
from disagg.kernels.view import Partial, View


def attend(q: Tensor, view: View, scale: float, cap: float = 0.0) -> Partial:
    """Attention over slots; what each holds is as `ExactFormat` says.

    q:       [B, M, Hq, D] fp32 or fp64 - query head i reads KV head i // (Hq / heads)
    scale, cap: as in `Softmax`
    returns: o [B, M, Hq, D], lse [B, M, Hq] of the dtype of q - the natural log of
             sum exp(score); a query that sees nothing has o = 0 and lse = -inf
    """
    fmt = view.fmt
    assert isinstance(fmt, ExactFormat)
    first, last = (
        visible_pages(view, fmt.tokens) if fmt.counted else (0, view.pages.shape[1])
    )
    k, v = gather_raw(view.arena, view.pages[:, first:last], fmt, view.base, view.heads)
    if fmt.counted:
        seen = seen_tokens(view, first * fmt.tokens, k.shape[2])
    elif fmt.side is not None:
        k, v = k[:, :, : fmt.side.slots], v[:, :, : fmt.side.slots]
        seen = _seen_of_side(view, fmt.side, k.shape[2])
    else:
        seen = _seen_of_pages(view, fmt)
    p, lse = masked_softmax(
        k.to(q.dtype) @ columns_of(q * scale, view.heads), seen, cap
    )
    return partial_of(v.to(q.dtype).transpose(2, 3) @ p, lse, q.shape[1])


def _seen_of_side(view: View, side: SlotsFormat, room: int) -> Tensor:
    """[B, H, room, M] bool: which slots of the side record each query sees."""
    assert view.sides is not None
    at = view.sides.unsqueeze(1), view.side_base, view.heads, side.block_bytes
    record, shape = ArenaBlocks(view.arena, *at), (1, side.slots)
    positions = record.plane(torch.int32, side.positions, shape)[:, :, 0, 0, :room]
    states = record.plane(torch.uint8, side.states, shape)[:, :, 0, 0, :room]
    return seen_at(view, positions) & (states != FREE).unsqueeze(3)


def _seen_of_pages(view: View, fmt: ExactFormat) -> Tensor:
    """[B, H, P * slots, M] bool: which slots each query sees, by the positions in the pages.

    A short row is padded with pages that it shows elsewhere, behind the tokens it covers.
    """
    assert fmt.positions is not None
    blocks = ArenaBlocks(view.arena, view.pages, view.base, view.heads, fmt.block_bytes)
    place = blocks.plane(torch.int32, fmt.positions, (fmt.slots, 1)).flatten(2)
    page = torch.arange(view.pages.shape[1], device=place.device) * fmt.tokens
    covered = page.repeat_interleave(fmt.slots)[:, None] < view.hi[:, None, None]
    return seen_at(view, place) & covered
