"""Units of work: every tile that a sequence shows is in one unit, and no unit crosses a segment."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.codecs import get_codec
from disagg.codecs.quantized import prompt_format
from disagg.kernels.gpu import plan
from disagg.paged.page_tables import PageTable, room_for_units

PAGE = plan.Tile(64, 4096)
SEQUENCE = st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 9))
SEQUENCES = st.lists(SEQUENCE, min_size=1, max_size=9)


def span_of(lo: list[int], hi: list[int], tile: plan.Tile = PAGE) -> plan.Span:
    """What sequences show of pages of 64 tokens."""
    return plan.Span(tile, np.array(lo), np.array(hi), max(hi))


@given(SEQUENCES, st.integers(1, 40), st.booleans())
def test_units_are_what_the_sequences_show_each_tile_once(sequences, programs, shared):
    lo, hi = (np.array([x[i] for x in sequences]) for i in (0, 1))
    width = max(1, -(-int(hi.max()) // 64))
    owner = segments = None
    if shared:
        owner = np.array([[p // n for p in range(width)] for _, _, n in sequences])
        segments = 100 * np.arange(len(lo))[:, None] + np.arange(owner.max() + 1)
    span = plan.Span(PAGE, lo, hi, 64 * width, owner, segments)
    table, seen = span.units(programs), []
    for b, start, end, segment in table:
        assert start < end
        seen += [(b, i) for i in range(start, end)]
        if owner is not None:
            assert {100 * b + int(x) for x in owner[b, start:end]} == {segment}
    shown = range(len(lo))
    tiles = [
        range(lo[b] // 64, -(-hi[b] // 64)) if hi[b] > lo[b] else () for b in shown
    ]
    assert seen == [(b, i) for b in shown for i in tiles[b]]
    assert len(table) <= span.most_units(programs)


def test_there_is_room_for_pages_that_join_the_first_segment_while_decoding():
    owner, many = np.array([[0, 0, 1, 1, 0]] * 9), np.full(9, 320)
    span = plan.Span(PAGE, 0 * many, many, 320, owner, np.arange(18).reshape(9, 2))
    assert len(span.units(1)) == 27 <= span.most_units(1)


def test_units_of_a_sequence_are_equally_long_and_not_too_short():
    table = span_of([0, 0], [64 * 100, 64 * 3]).units(8)
    sizes = table[:, 2] - table[:, 1]
    assert table[:, 0].tolist() == [0] * 8 + [1]
    assert sizes.tolist() == [13, 13, 13, 13, 13, 13, 13, 9, 3]
    table = span_of([0], [64 * 20]).units(1000)
    assert (table[:, 2] - table[:, 1]).tolist() == [plan.MIN_TILES] * 5


def test_programs_of_more_warps_are_fewer():
    for warps, count in ((1, 8), (2, 4)):
        span = span_of([0], [64 * 100], plan.Tile(64, 4096, warps=warps))
        table, _ = plan.units_of_spans([span], 1, torch.device("cpu"))
        assert len(table) == count


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("spec", ["banded", "kivi:bits=2"])
def test_units_are_planned_for_the_warps_that_kernels_have(spec, head_dim):
    codec, many = get_codec(spec), torch.full((1, 1), 64 * 200, dtype=torch.int32)
    group = codec.layer_group((0,), 1, head_dim, "float16")
    fmt, pages = prompt_format(codec, head_dim), torch.zeros(1, 200, dtype=torch.int32)
    table = PageTable(pages, 0 * many, many, fmt, layout=group.page)
    span = span_of([0], [64 * 200], plan.tile_of(fmt))
    wanted = plan.most_units([span], 1, torch.device("cpu"))
    assert room_for_units(group, [table], torch.device("cpu")) == wanted


def test_no_recorded_step_has_more_units_than_a_gpu_starts():
    nobody, segments = np.zeros(64, dtype=int), np.zeros((64, 2048))
    span = plan.Span(PAGE, nobody, nobody, 1 << 20, None, segments)
    assert (
        span.most_units(16)
        > plan.MAX_GRID
        == plan.most_units([span], 8, torch.device("cpu"))
    )


def test_pages_that_say_their_positions_are_all_read_behind_a_window():
    table = span_of([500], [640], plan.Tile(64, 4096, counted=False)).units(1)
    assert table.tolist() == [[0, 0, 10, 0]]


def test_nobody_to_attend_is_one_unit_without_work():
    table, starts = plan.units_of_spans(
        [span_of([0, 9], [0, 9])], 1, torch.device("cpu")
    )
    assert table.tolist() == [[0, 0, 0, 0, 0]]
    assert starts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_buffer_for_more_rows_and_pages_holds_fewer(rows):
    def most(rows: int, pages: int) -> int:
        nobody = np.zeros(rows, dtype=int)
        return plan.Span(
            PAGE, nobody, nobody, 64 * pages, None, np.zeros((rows, 2))
        ).most_units(16)

    counts = [most(rows, pages) for pages in range(1, 40)]
    assert counts == sorted(counts)
    assert counts[-1] <= most(rows + 1, 40)
