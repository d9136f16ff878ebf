"""Units of work: every tile that a sequence shows is in one unit, and no unit crosses a segment."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.kernels.gpu.plan import MIN_TILES, Tiling

SEQUENCES = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 9)), min_size=1, max_size=9
)


@given(SEQUENCES, st.integers(1, 40), st.booleans())
def test_units_are_what_the_sequences_show_each_tile_once(sequences, programs, shared):
    lo, hi = (np.array([x[i] for x in sequences]) for i in (0, 1))
    tiling, width = Tiling(64, True, programs), max(1, -(-int(hi.max()) // 64))
    owner = segments = None
    if shared:
        owner = np.array([[p // n for p in range(width)] for _, _, n in sequences])
        segments = 100 * np.arange(len(lo))[:, None] + np.arange(owner.max() + 1)
    table, starts = tiling.units(lo, hi, owner, segments)
    seen = []
    for b in range(len(lo)):
        for batch, start, end, segment in table[starts[b] : starts[b + 1]]:
            assert batch == b
            assert start < end
            seen += [(b, i) for i in range(start, end)]
            if owner is not None:
                assert {100 * b + int(x) for x in owner[b, start:end]} == {segment}
    shown = range(len(lo))
    tiles = [range(lo[b] // 64, -(-hi[b] // 64)) if hi[b] > lo[b] else () for b in shown]
    assert seen == [(b, i) for b in shown for i in tiles[b]]
    used = int(starts[-1])
    assert not table[used:].any()
    most = tiling.most_units(len(lo), 64 * width, 0 if segments is None else segments.shape[1])
    assert used <= most


def test_units_of_a_sequence_are_equally_long_and_not_too_short():
    table, starts = Tiling(64, True, 8).units(np.array([0, 0]), np.array([64 * 100, 64 * 3]))
    sizes = table[:, 2] - table[:, 1]
    assert starts.tolist() == [0, 8, 9]
    assert sizes.tolist() == [13, 13, 13, 13, 13, 13, 13, 9, 3]
    table, _ = Tiling(64, True, 1000).units(np.array([0]), np.array([64 * 20]))
    assert (table[:, 2] - table[:, 1]).tolist() == [MIN_TILES] * 5


def test_pages_that_say_their_positions_are_all_read_behind_a_window():
    table, _ = Tiling(64, False, 1).units(np.array([500]), np.array([640]))
    assert table.tolist() == [[0, 0, 10, 0]]


def test_nobody_to_attend_is_one_unit_without_work():
    table, starts = Tiling(64, True, 4).units(np.array([0, 9]), np.array([0, 9]))
    assert table.tolist() == [[0, 0, 0, 0]]
    assert starts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_buffer_for_more_rows_and_pages_holds_fewer(rows):
    tiling = Tiling(64, True, 16)
    counts = [tiling.most_units(rows, 64 * tokens, 2) for tokens in range(1, 40)]
    assert counts == sorted(counts)
    assert counts[-1] <= tiling.most_units(rows + 1, 64 * 40, 2)
