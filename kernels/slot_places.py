"""Which token is in a slot: the one thing in which the members of the raw family differ.

Positions that are counted need no load and leave whole tiles without a mask. Others are loaded one
tile ahead, beside the page ids, so that nothing waits for them.
"""

import triton
import triton.language as tl

from disagg.kernels import formats_exact
from disagg.kernels.reference_kept import FREE
from disagg.kernels.tiles import as_bytes, hide
from disagg.kernels.units import find_unit

STRIP = tl.constexpr(formats_exact.STRIP)
TILE = tl.constexpr(formats_exact.STRIP * formats_exact.TILE_STRIPS)
FAR = tl.constexpr(1 << 30)  # behind all tokens: an empty slot
IS_FREE = tl.constexpr(FREE)


@triton.jit
def find_slots(
    lo_ptr, hi_ptr, batch, width, slot, slots, BATCH_PAD: tl.constexpr, FMT: tl.constexpr
):
    """The unit of work of a slot of the grid: (sequence, first tile, end tile, limit).

    limit: what is behind it is empty: slots of the side record that have pages; or tokens that the
           sequence shows, because a short row of a table repeats pages behind them
    """
    if FMT.side is not None:  # few, and one unit
        limit = tl.minimum(width * STRIP, FMT.side.slots)
        return slot, 0, tl.cdiv(limit, TILE), limit
    else:
        T: tl.constexpr = FMT.tile_pages * FMT.tokens
        i_b, start, end = find_unit(lo_ptr, hi_ptr, batch, slot, slots, T, BATCH_PAD)
        return i_b, start, end, tl.load(hi_ptr + i_b, mask=i_b < batch, other=0)


@triton.jit
def find_places(arena_ptr, sides_ptr, base, side_base, i_b, i_head, FMT: tl.constexpr):
    """int32 pointer to the block of the side record of a sequence, or of page 0."""
    words_ptr = arena_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if FMT.side is not None:
        block = (side_base + i_head * FMT.side.block_bytes) // 4
        return words_ptr + (tl.load(sides_ptr + i_b).to(tl.int64) * 32 + block)
    else:
        return words_ptr + (base + i_head * FMT.block_bytes) // 4


@triton.jit
def load_places(places_ptr, pages, i_tile, limit, FMT: tl.constexpr):
    """Positions [TILE] of the tokens in the slots of a tile, FAR where none is; () if counted.

    places_ptr, limit: see above; pages: the page id of each strip
    """
    o_s = tl.arange(0, TILE)
    if FMT.counted:
        places = ()
    elif FMT.side is not None:
        o_slot = i_tile * TILE + o_s
        m_s = o_slot < limit
        p_state = as_bytes(places_ptr, FMT.side.states) + o_slot
        free = tl.load(p_state, mask=m_s, other=IS_FREE) == IS_FREE
        p_place = places_ptr + FMT.side.positions // 4 + o_slot
        places = tl.where(free, FAR, tl.load(p_place, mask=m_s, other=FAR))
    else:
        STRIPS: tl.constexpr = FMT.strips
        o_strip = o_s // STRIP
        page = tl.where(o_strip == 0, pages[0], pages[1])
        page = tl.where(o_strip == 2, pages[2], tl.where(o_strip == 3, pages[3], page))
        o_slot = o_strip % STRIPS * STRIP + o_s % STRIP
        first = (i_tile * FMT.tile_pages + o_strip // STRIPS) * FMT.tokens
        p_place = places_ptr + page.to(tl.int64) * 32 + FMT.positions // 4 + o_slot
        m_s = (o_slot < FMT.slots) & (first < limit)
        places = tl.load(p_place, mask=m_s, other=FAR)
    return places


@triton.jit
def hide_slots(s, places, i_tile, lo, hi, FMT: tl.constexpr):
    """Scores [TILE, C] of a tile; those of tokens outside [lo, hi) of their column become -inf."""
    if FMT.counted:
        return hide(s, i_tile * TILE + tl.arange(0, TILE), lo, hi)
    else:
        return hide(s, places, lo, hi)
