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
PROGRAMS = st.integers(1, 40)
SEQUENCE = st.tuples(
    st.integers(0, 3000),  # first token
    st.integers(0, 3000),  # end token
    st.integers(1, 9),  # pages of a segment
)
SEQUENCES = st.lists(SEQUENCE, min_size=1, max_size=9)


def span_of(lo: list[int], hi: list[int], tile: plan.Tile = PAGE) -> plan.Span:
    """Sequences that show tokens lo to hi of pages of 64 tokens."""
    return plan.Span(
        tile,
        lo=np.array(lo),
        hi=np.array(hi),
        most=max(hi),
    )


def empty_span(rows: int, most: int, segments: int) -> plan.Span:
    """Sequences that show nothing yet, in a table for `most` tokens and some segments."""
    none_visible = np.zeros(rows, dtype=int)
    return plan.Span(
        PAGE,
        lo=none_visible,
        hi=none_visible,
        most=most,
        segments=np.zeros((rows, segments)),
    )


def tiles_of(sequence: int, first: int, end: int) -> list[tuple[int, int]]:
    """(sequence, tile) of tiles first .. end - 1."""
    return [(sequence, tile) for tile in range(first, end)]


def visible_tiles(span: plan.Span) -> list[tuple[int, int]]:
    """(sequence, tile) of all tiles that sequences show, in order."""
    tiles = []
    for sequence, (lo, hi) in enumerate(zip(span.lo, span.hi, strict=True)):
        if hi > lo:
            first = lo // 64
            end = -(-hi // 64)
            tiles += tiles_of(sequence, first, end)
    return tiles


def span_with_segments(sequences) -> plan.Span:
    """Page p of a sequence belongs to segment 100 * sequence + p // pages of a segment."""
    lo, hi, segment_pages = np.array(sequences).T
    last_page = -(-int(hi.max()) // 64)
    width = max(1, last_page)
    owner = np.arange(width) // segment_pages[:, None]
    first_segments = 100 * np.arange(len(lo))
    segment_count = owner.max() + 1
    return plan.Span(
        PAGE,
        lo=lo,
        hi=hi,
        most=64 * width,
        owner=owner,
        segments=first_segments[:, None] + np.arange(segment_count),
    )


@given(
    sequences=SEQUENCES,
    programs=PROGRAMS,
    shared=st.booleans(),
)
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


@given(sequences=SEQUENCES, programs=PROGRAMS)
def test_no_unit_crosses_a_segment(sequences, programs):
    span = span_with_segments(sequences)

    table = span.units(programs)

    for sequence, start, end, segment in table:
        owners = set(span.owner[sequence, start:end].tolist())
        segments = {100 * sequence + owner for owner in owners}
        assert segments == {segment}


def test_there_is_room_for_pages_that_rejoin_the_first_segment():
    """The fifth page, sealed while decoding, belongs to segment 0 again."""
    batch = 9
    hi = np.full(batch, 320)
    span = plan.Span(
        PAGE,
        lo=np.zeros_like(hi),
        hi=hi,
        most=320,
        owner=np.array([[0, 0, 1, 1, 0]] * batch),
        segments=np.arange(2 * batch).reshape(batch, 2),
    )

    table = span.units(1)

    assert len(table) == 3 * batch
    assert len(table) <= span.most_units(1)


def test_units_of_a_sequence_are_equally_long():
    span = span_of(lo=[0, 0], hi=[64 * 100, 64 * 3])

    table = span.units(8)

    sequences = table[:, 0].tolist()
    sizes = table[:, 2] - table[:, 1]
    assert sequences == [0] * 8 + [1]
    assert sizes.tolist() == [13] * 7 + [9, 3]


def test_units_of_a_sequence_are_not_too_short():
    span = span_of(lo=[0], hi=[64 * 20])

    table = span.units(1000)

    sizes = table[:, 2] - table[:, 1]
    assert sizes.tolist() == [plan.MIN_TILES] * 5


def test_programs_of_more_warps_are_fewer():
    counts = {}
    for warps in (1, 2):
        tile = plan.Tile(64, 4096, warps=warps)
        span = span_of(lo=[0], hi=[64 * 100], tile=tile)
        table, _ = plan.units_of_spans([span], 1, CPU)
        counts[warps] = len(table)

    assert counts == {1: 8, 2: 4}


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("spec", ["banded", "kivi:bits=2"])
def test_units_are_planned_for_the_warps_that_kernels_have(spec, head_dim):
    count = 200
    codec = get_codec(spec)
    group = codec.layer_group((0,), 1, head_dim, "float16")
    fmt = prompt_format(codec, head_dim)
    table = PageTable(
        pages=torch.zeros(1, count, dtype=torch.int32),
        lo=torch.zeros(1, 1, dtype=torch.int32),
        hi=torch.full((1, 1), 64 * count, dtype=torch.int32),
        fmt=fmt,
        layout=group.page,
    )
    span = span_of(lo=[0], hi=[64 * count], tile=plan.tile_of(fmt))

    room = room_for_units(group, [table], CPU)

    assert room == plan.most_units([span], 1, CPU)


def test_no_recorded_step_has_more_units_than_a_gpu_starts():
    span = empty_span(rows=64, most=1 << 20, segments=2048)

    assert span.most_units(16) > plan.MAX_GRID
    assert plan.most_units([span], 8, CPU) == plan.MAX_GRID


def test_pages_with_positions_are_all_read_under_a_window():
    tile = plan.Tile(64, 4096, counted=False)
    span = span_of(lo=[500], hi=[640], tile=tile)

    table = span.units(1)

    assert table.tolist() == [[0, 0, 10, 0]]


def test_without_visible_tokens_there_is_one_unit_without_work():
    span = span_of(lo=[0, 9], hi=[0, 9])

    table, starts = plan.units_of_spans([span], 1, CPU)

    assert table.tolist() == [[0, 0, 0, 0, 0]]
    assert starts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_buffer_for_more_rows_and_pages_holds_fewer(rows):
    def most(rows: int, pages: int) -> int:
        span = empty_span(rows, most=64 * pages, segments=2)
        return span.most_units(16)

    counts = [most(rows, pages) for pages in range(1, 40)]

    assert counts == sorted(counts)
    assert counts[-1] <= most(rows + 1, 40)
