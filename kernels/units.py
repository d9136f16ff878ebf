"""How attention is cut into units of work, decided on the device, so a CUDA graph fits any lengths.

The grid has a fixed number of slots. Every program reads how many tiles (pages, or groups of raw
pages) each sequence shows, and finds the unit of its slot by itself:

    sequence 0            sequence 1   sequence 2
    |  u0  |  u1  |  u2  |     u3     |  u4  |  u5  |  -      slots; the last one has no work

All units of a sequence are equally long and none crosses a sequence. The partial results are
merged by reduce.py, which finds the same cut.
"""

import triton
import triton.language as tl

MIN_TILES = tl.constexpr(
    4
)  # fewer than these cost more in partial results than they win in parallel reads


@triton.jit
def find_cut(lo_ptr, hi_ptr, batch, slots, tile, BATCH_PAD: tl.constexpr):
    """Tiles and units of every sequence.

    lo_ptr, hi_ptr: [batch] int32 - the tokens that any query of the sequence sees; lo_ptr None:
                    from the first on
    returns:        first tile, tiles, units, units before: each [BATCH_PAD] int32
    """
    i_batch = tl.arange(0, BATCH_PAD)
    m_batch = i_batch < batch
    if lo_ptr is None:
        lo = tl.zeros_like(i_batch)
    else:
        lo = tl.load(lo_ptr + i_batch, mask=m_batch, other=0)
    hi = tl.load(hi_ptr + i_batch, mask=m_batch, other=0)
    first = lo // tile
    tiles = tl.where(hi > lo, (hi + tile - 1) // tile - first, 0)
    # sum of ceil(tiles / longest) <= slots, because slots > batch
    longest = tl.maximum(tl.cdiv(tl.sum(tiles, 0), slots - batch), MIN_TILES)
    units = (tiles + longest - 1) // longest
    return first, tiles, units, tl.cumsum(units, 0) - units


@triton.jit
def pick(values, i, i_all):
    """values[i], for a vector that lives in registers."""
    return tl.sum(tl.where(i_all == i, values, 0), 0)


@triton.jit
def find_unit(lo_ptr, hi_ptr, batch, slot, slots, tile, BATCH_PAD: tl.constexpr):
    """(sequence, first tile, end tile) of a slot; the sequence is `batch` or more without work."""
    first, tiles, units, before = find_cut(lo_ptr, hi_ptr, batch, slots, tile, BATCH_PAD)
    i_all = tl.arange(0, BATCH_PAD)
    i_b = tl.sum((before + units <= slot).to(tl.int32), 0)
    count = pick(tiles, i_b, i_all)
    size = tl.cdiv(count, tl.maximum(pick(units, i_b, i_all), 1))
    start = (slot - pick(before, i_b, i_all)) * size
    origin = pick(first, i_b, i_all)
    return i_b, origin + start, origin + tl.minimum(start + size, count)
