"""Units of work: every tile that a sequence shows is in one unit, and no unit crosses a segment."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.codecs import get_codec
from disagg.codecs.quantized import prompt_format
from disagg.kernels.gpu import plan
from disagg.paged.page_tables import PageTable, room_for_units

CPU = torch.device("cpu")
PAGE = plan.Tile(64, 4096)
# (first token, end token, pages of a segment)
SEQUENCE = st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 9))
SEQUENCES = st.lists(SEQUENCE, min_size=1, max_size=9)


def span_of(lo: list[int], hi: list[int], tile: plan.Tile = PAGE) -> plan.Span:
    """Sequences that show tokens lo to hi of pages of 64 tokens."""
    return plan.Span(tile, np.array(lo), np.array(hi), max(hi))


def tiles_of(sequence: int, first: int, end: int) -> list[tuple[int, int]]:
    """(sequence, tile) of tiles first .. end - 1."""
    return [(sequence, tile) for tile in range(first, end)]


def visible_tiles(span: plan.Span) -> list[tuple[int, int]]:
    """(sequence, tile) of all tiles that sequences show, in order."""
    tiles = []
    for sequence, (lo, hi) in enumerate(zip(span.lo, span.hi, strict=True)):
        if hi > lo:
            tiles += tiles_of(sequence, lo // 64, -(-hi // 64))
    return tiles


def span_with_segments(sequences) -> plan.Span:
    """Page p of a sequence belongs to segment 100 * sequence + p // pages of a segment."""
    lo, hi, segment_pages = np.array(sequences).T
    width = max(1, -(-int(hi.max()) // 64))
    owner = np.arange(width) // segment_pages[:, None]
    segments = 100 * np.arange(len(lo))[:, None] + np.arange(owner.max() + 1)
    return plan.Span(PAGE, lo, hi, 64 * width, owner, segments)


@given(SEQUENCES, st.integers(1, 40), st.booleans())
def test_units_hold_each_visible_tile_once(sequences, programs, shared):
    span = span_with_segments(sequences)
    if not shared:
        span = replace(span, owner=None, segments=None)

    table = span.units(programs)

    tiles = []

    for sequence, start, end, _ in table:
        assert start < end
        tiles += tiles_of(sequence, start, end)
    assert tiles == visible_tiles(span)
    assert len(table) <= span.most_units(programs)


@given(SEQUENCES, st.integers(1, 40))
def test_no_unit_crosses_a_segment(sequences, programs):
    span = span_with_segments(sequences)

    for sequence, start, end, segment in span.units(programs):
        owners = set(span.owner[sequence, start:end].tolist())
        assert {100 * sequence + owner for owner in owners} == {segment}


def test_there_is_room_for_pages_that_join_the_first_segment_while_decoding():
    owner = np.array([[0, 0, 1, 1, 0]] * 9)
    hi = np.full(9, 320)
    span = plan.Span(
        PAGE, np.zeros_like(hi), hi, 320, owner, np.arange(18).reshape(9, 2)
    )

    assert len(span.units(1)) == 27 <= span.most_units(1)


def test_units_of_a_sequence_are_equally_long():
    table = span_of([0, 0], [64 * 100, 64 * 3]).units(8)

    sizes = table[:, 2] - table[:, 1]

    assert table[:, 0].tolist() == [0] * 8 + [1]
    assert sizes.tolist() == [13, 13, 13, 13, 13, 13, 13, 9, 3]


def test_units_of_a_sequence_are_not_too_short():
    table = span_of([0], [64 * 20]).units(1000)

    assert (table[:, 2] - table[:, 1]).tolist() == [plan.MIN_TILES] * 5


def test_programs_of_more_warps_are_fewer():
    for warps, count in ((1, 8), (2, 4)):
        span = span_of([0], [64 * 100], plan.Tile(64, 4096, warps=warps))
        table, _ = plan.units_of_spans([span], 1, CPU)
        assert len(table) == count


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("spec", ["banded", "kivi:bits=2"])
def test_units_are_planned_for_the_warps_that_kernels_have(spec, head_dim):
    codec = get_codec(spec)
    group = codec.layer_group((0,), 1, head_dim, "float16")
    fmt = prompt_format(codec, head_dim)
    pages = torch.zeros(1, 200, dtype=torch.int32)
    hi = torch.full((1, 1), 64 * 200, dtype=torch.int32)
    table = PageTable(pages, torch.zeros_like(hi), hi, fmt, layout=group.page)
    span = span_of([0], [64 * 200], plan.tile_of(fmt))

    expected = plan.most_units([span], 1, CPU)

    assert room_for_units(group, [table], CPU) == expected


def test_no_recorded_step_has_more_units_than_a_gpu_starts():
    none_visible = np.zeros(64, dtype=int)
    segments = np.zeros((64, 2048))
    span = plan.Span(PAGE, none_visible, none_visible, 1 << 20, None, segments)

    assert span.most_units(16) > plan.MAX_GRID
    assert plan.most_units([span], 8, CPU) == plan.MAX_GRID


def test_pages_that_say_their_positions_are_all_read_behind_a_window():
    table = span_of([500], [640], plan.Tile(64, 4096, counted=False)).units(1)

    assert table.tolist() == [[0, 0, 10, 0]]


def test_without_visible_tokens_there_is_one_unit_without_work():
    table, starts = plan.units_of_spans([span_of([0, 9], [0, 9])], 1, CPU)

    assert table.tolist() == [[0, 0, 0, 0, 0]]
    assert starts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_buffer_for_more_rows_and_pages_holds_fewer(rows):
    def most(rows: int, pages: int) -> int:
        none_visible = np.zeros(rows, dtype=int)
        segments = np.zeros((rows, 2))
        span = plan.Span(PAGE, none_visible, none_visible, 64 * pages, None, segments)
        return span.most_units(16)

    counts = [most(rows, pages) for pages in range(1, 40)]

    assert counts == sorted(counts)
    assert counts[-1] <= most(rows + 1, 40)
