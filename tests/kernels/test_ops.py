"""What the kernels' entry points refuse, and that the rest goes to the right backend."""

from dataclasses import replace

import pytest
import torch

from disagg.kernels import ops
from disagg.kernels.cpu.library import CODE_ERRORS, backend
from disagg.kernels.sealing import NewRows, Sealing, SealRows
from disagg.kernels.view import Softmax
from tests.kernels import cases
from tests.synthetic import relative_error

FMT = cases.quant_format(4, 64, 32, 32)


SCALED = Softmax(0.125)


def two_sequences(fmt=FMT):
    return cases.make_case(
        fmt,
        lengths=[100, 64],
        heads=2,
        width=3,
    )


def attend(case, **changes):
    q = changes.pop("q", case.q)
    view = replace(case.view, **changes)
    return ops.attend(q, [view], SCALED)


def zeros(*shape, dtype):
    return torch.zeros(shape, dtype=dtype)


def test_attention_over_several_views_is_one_answer():
    case = two_sequences()
    expected, _ = cases.exact_attention(case, SCALED.scale)
    bound = CODE_ERRORS[backend()]

    o_of_one = attend(case)

    assert relative_error(o_of_one, expected) <= bound

    cut = cases.int32([70], [3])
    front = replace(case.view, hi=cut)
    back = replace(case.view, lo=cut)
    o = ops.attend(case.q, [front, back], SCALED)

    assert relative_error(o, expected) <= bound

    half = ops.attend(case.q.half(), [front, back], SCALED)

    assert half.dtype == torch.float16
    assert relative_error(half, expected) <= 2e-3


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("q", zeros(2, 1, 6, 64, dtype=torch.int32), TypeError),
        ("q", zeros(2, 1, 6, 32, dtype=torch.float32), ValueError),
        ("q", zeros(2, 1, 5, 64, dtype=torch.float32), ValueError),
        ("pages", zeros(2, 2, dtype=torch.int64), TypeError),
        ("pages", zeros(3, 2, dtype=torch.int32), ValueError),
        ("pages", zeros(2, 0, dtype=torch.int32), ValueError),
        ("lo", zeros(2, 2, dtype=torch.int32), ValueError),
        ("hi", zeros(2, dtype=torch.int32), ValueError),
        ("arena", zeros(128, dtype=torch.int8), TypeError),
        ("arena", zeros(256, dtype=torch.uint8)[::2], ValueError),
    ],
)
def test_attention_refuses_what_it_would_misread(field, value, error):
    case = two_sequences()

    with pytest.raises(error):
        attend(case, **{field: value})


def test_encode_refuses_parts_of_pages_and_integers():
    too_long = torch.zeros(2, 65, 64)
    integers = torch.zeros(2, 64, 64).int()
    narrow = torch.zeros(2, 64, 32)

    with pytest.raises(ValueError, match="multiple of 64"):
        ops.encode(too_long, too_long, FMT)
    with pytest.raises(TypeError):
        ops.encode(integers, integers, FMT)
    with pytest.raises(ValueError, match="64"):
        ops.encode(narrow, narrow, FMT)


def test_sum_squares_refuses_uneven_groups_and_wrong_starts():
    """6 query heads do not fall into 4 groups, and a unit has 16 tokens."""
    q = torch.zeros(6, 5, 16)

    for heads, begun in (
        (4, 0),
        (3, 16),
        (3, -1),
    ):
        with pytest.raises(ValueError, match="expected"):
            ops.sum_squares(q, heads, begun)


def test_decode_refuses_blocks_of_another_size():
    blocks = zeros(1, 16, dtype=torch.uint8)

    with pytest.raises(ValueError, match="bytes"):
        ops.decode(blocks, None, FMT)


def test_attention_to_nothing_is_refused():
    q = torch.zeros(1, 1, 2, 64)

    with pytest.raises(ValueError, match="no views"):
        ops.attend(q, [], SCALED)


def test_pages_that_share_segments_are_not_attended_without_them():
    case = two_sequences(cases.make_format(rank=2))
    owner_of_one_page = case.view.owner[:, :1]

    with pytest.raises(ValueError, match="segments"):
        attend(case, segments=None)
    with pytest.raises(ValueError, match="owner"):
        attend(case, owner=owner_of_one_page)


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 3},
        {"tokens": 62},
        {"group": 48},
        {"v_group": 24},
        {"head_dim": 66},
    ],
)
def test_a_format_that_does_not_divide_is_refused(options):
    with pytest.raises(ValueError, match=r"bits|words|divide"):
        cases.make_format(**options)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pages": zeros(3, dtype=torch.int32)}, ValueError),
        ({"tails": zeros(2, 3, dtype=torch.int32)}, ValueError),
        ({"stretches": zeros(2, dtype=torch.int64)}, TypeError),
        ({"fmt": cases.make_format(valid=True)}, ValueError),
    ],
)
def test_an_append_refuses_tables_that_do_not_fit_its_rows(changes, error):
    none = cases.int32(-1, -1)
    rows = SealRows(
        pages=none,
        tails=torch.full((2, 4), -1).int(),
        segments=none,
        stretches=none,
    )
    fmt = changes.pop("fmt", FMT)
    sealing = Sealing(replace(rows, **changes), fmt, cases.BASE)
    new = NewRows(
        pages=cases.int32(0, 0),
        slots=cases.int32(0, 0),
        fmt=cases.raw_format("float32", 64),
        base=cases.BASE,
    )
    arena = zeros(1 << 16, dtype=torch.uint8)
    x = torch.ones(2, 2, 64)

    with pytest.raises(error):
        ops.append(arena, x, x, new, sealing)
    assert not arena.any()
