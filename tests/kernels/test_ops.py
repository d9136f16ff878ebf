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


def attend(case, **changes):
    q = changes.pop("q", case.q)
    return ops.attend(q, [replace(case.view, **changes)], Softmax(0.125))


def test_attention_over_several_views_is_one_answer():
    case = cases.make_case(FMT, [100, 64], 2, 3)
    expected, _ = cases.exact_attention(case, 0.125)
    bound = CODE_ERRORS[backend()]

    assert relative_error(attend(case), expected) <= bound

    cut = torch.tensor([[70], [3]], dtype=torch.int32)
    views = replace(case.view, hi=cut), replace(case.view, lo=cut)
    o = ops.attend(case.q, views, Softmax(0.125))

    assert relative_error(o, expected) <= bound

    half = ops.attend(case.q.half(), views, Softmax(0.125))

    assert half.dtype == torch.float16
    assert relative_error(half, expected) <= 2e-3


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"q": torch.zeros(2, 1, 6, 64).int()}, TypeError),
        ({"q": torch.zeros(2, 1, 6, 32)}, ValueError),
        ({"q": torch.zeros(2, 1, 5, 64)}, ValueError),
        ({"pages": torch.zeros(2, 2, dtype=torch.int64)}, TypeError),
        ({"pages": torch.zeros(3, 2, dtype=torch.int32)}, ValueError),
        ({"pages": torch.zeros(2, 0, dtype=torch.int32)}, ValueError),
        ({"lo": torch.zeros(2, 2, dtype=torch.int32)}, ValueError),
        ({"hi": torch.zeros(2, dtype=torch.int32)}, ValueError),
        ({"arena": torch.zeros(128, dtype=torch.int8)}, TypeError),
        ({"arena": torch.zeros(256, dtype=torch.uint8)[::2]}, ValueError),
    ],
)
def test_attention_refuses_what_it_would_misread(changes, error):
    with pytest.raises(error):
        attend(cases.make_case(FMT, [100, 64], 2, 3), **changes)


def test_encode_refuses_parts_of_pages_and_integers():
    x = torch.zeros(2, 65, 64)

    with pytest.raises(ValueError, match="multiple of 64"):
        ops.encode(x, x, FMT)
    with pytest.raises(TypeError):
        ops.encode(x[:, :64].int(), x[:, :64].int(), FMT)
    with pytest.raises(ValueError, match="64"):
        ops.encode(x[:, :64, :32], x[:, :64, :32], FMT)


def test_squares_are_of_whole_groups_of_heads_and_begin_within_a_unit():
    for heads, begun in ((4, 0), (3, 16), (3, -1)):
        with pytest.raises(ValueError, match="expected"):
            ops.sum_squares(torch.zeros(6, 5, 16), heads, begun)


def test_decode_refuses_blocks_of_another_size():
    with pytest.raises(ValueError, match="bytes"):
        ops.decode(torch.zeros(1, 16, dtype=torch.uint8), None, FMT)


def test_attention_to_nothing_is_refused():
    with pytest.raises(ValueError, match="no views"):
        ops.attend(torch.zeros(1, 1, 2, 64), [], Softmax(1.0))


def test_pages_that_share_segments_are_not_attended_without_them():
    case = cases.make_case(cases.make_format(rank=2), [100, 64], 2, 3)
    with pytest.raises(ValueError, match="segments"):
        attend(case, segments=None)
    with pytest.raises(ValueError, match="owner"):
        attend(case, owner=case.view.owner[:, :1])


@pytest.mark.parametrize(
    "options",
    [{"bits": 3}, {"tokens": 62}, {"group": 48}, {"v_group": 24}, {"head_dim": 66}],
)
def test_a_format_that_does_not_divide_is_refused(options):
    with pytest.raises(ValueError, match=r"bits|words|divide"):
        cases.make_format(**options)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pages": torch.zeros(3).int()}, ValueError),
        ({"tails": torch.zeros(2, 3).int()}, ValueError),
        ({"stretches": torch.zeros(2).long()}, TypeError),
        ({"fmt": cases.make_format(valid=True)}, ValueError),
    ],
)
def test_an_append_refuses_tables_that_do_not_fit_its_rows(changes, error):
    rows = SealRows(
        pages=torch.full((2,), -1).int(),
        tails=torch.full((2, 4), -1).int(),
        segments=torch.full((2,), -1).int(),
        stretches=torch.full((2,), -1).int(),
    )
    fmt = changes.pop("fmt", FMT)
    sealing = Sealing(replace(rows, **changes), fmt, cases.BASE)
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    x = torch.ones(2, 2, 64)
    ids = rows.pages + 1
    new = NewRows(ids, ids, cases.raw_format("float32", 64), cases.BASE)

    with pytest.raises(error):
        ops.append(arena, x, x, new, sealing)
    assert not arena.any()
