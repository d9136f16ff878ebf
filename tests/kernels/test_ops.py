"""What the entrance of the kernels refuses, and that it hands the rest to the right path."""

from dataclasses import replace

import pytest
import torch

from disagg.kernels import ops
from disagg.kernels.cpu.library import CODE_ERRORS, backend
from disagg.kernels.formats import QuantFormat
from disagg.kernels.formats_paged import as_paged
from disagg.kernels.sealing import Sealing, SealRows
from tests.kernels.cases import (
    BASE,
    exact_attention,
    quant_case,
    quant_format,
    raw_format,
    relative_error,
)
from tests.kernels.test_paged_pieces import make_format

FMT = quant_format(4, 64, 32, 32)


def attend(case, **changes):
    case = replace(case, **changes)
    return ops.attend_quantized(
        case.q, case.arena, case.pages, case.lo, case.hi, FMT, BASE, 2, 0.125
    )


def test_attention_runs_where_its_tensors_are():
    case = quant_case(FMT, [100, 64], heads=2, width=3)
    o = ops.merge([attend(case)])
    assert relative_error(o, exact_attention(case, 0.125)[0]) <= CODE_ERRORS[backend()]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"q": torch.zeros(2, 1, 6, 64).half()}, TypeError),
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
        attend(quant_case(FMT, [100, 64], heads=2, width=3), **changes)


def test_encode_refuses_parts_of_pages_and_integers():
    x = torch.zeros(2, 65, 64)
    with pytest.raises(ValueError, match="multiple of 64"):
        ops.encode_quantized(x, x, FMT)
    with pytest.raises(TypeError):
        ops.encode_quantized(x[:, :64].int(), x[:, :64].int(), FMT)
    with pytest.raises(ValueError, match="64"):
        ops.encode_quantized(x[:, :64, :32], x[:, :64, :32], FMT)


def test_encode_of_no_tokens_is_no_blocks():
    x = torch.zeros(2, 0, 64)
    assert ops.encode_quantized(x, x, FMT).shape == (0, 2, FMT.block_bytes)


def test_decode_refuses_blocks_of_another_size():
    with pytest.raises(ValueError, match="bytes"):
        ops.decode_quantized(torch.zeros(1, 16, dtype=torch.uint8), FMT)


def test_merge_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing"):
        ops.merge([])


@pytest.mark.parametrize(
    "changes", [{"bits": 3}, {"tokens": 62}, {"k_group": 48}, {"v_group": 24}, {"head_dim": 66}]
)
def test_a_format_that_does_not_divide_is_refused(changes):
    fields = {name: getattr(FMT, name) for name in QuantFormat.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"bits|multiple|divide"):
        QuantFormat(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pages": torch.zeros(3).int()}, ValueError),
        ({"tails": torch.zeros(2, 3).int()}, ValueError),
        ({"stretches": torch.zeros(2).long()}, TypeError),
        ({"fmt": make_format(valid=True)}, ValueError),
    ],
)
def test_an_append_refuses_tables_that_do_not_fit_its_rows(changes, error):
    rows = SealRows(*(torch.full(shape, -1).int() for shape in ((2,), (2, 4), (2,), (2,))))
    fmt = changes.pop("fmt", as_paged(FMT))
    sealing = Sealing(replace(rows, **changes), fmt, BASE)
    arena, x, ids = torch.zeros(1 << 16, dtype=torch.uint8), torch.ones(2, 2, 64), rows.pages + 1
    with pytest.raises(error):
        ops.append(arena, x, x, ids, ids, raw_format("float32", 64), BASE, sealing)
    assert not arena.any()
