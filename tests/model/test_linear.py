"""Laid weights multiply as they did, and only where oneDNN takes them and memory has room."""

import pytest
import torch
from torch import nn

from disagg.model import linear
from disagg.model.linear import PackedLinear, pack_linears

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Own(nn.Linear):
    """One of a model's own, which may compute something else."""


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    plain, other = nn.Linear(48, 80), nn.Linear(80, 33, bias=False)
    return (
        nn.Sequential(plain, nn.Sequential(nn.SiLU(), other))
        .to(dtype)
        .requires_grad_(False)
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [(1,), (1, 7), (2, 3, 40)])
def test_laid_weights_multiply_as_they_did(dtype, rows):
    if dtype == torch.bfloat16 and not BFLOAT16:
        pytest.skip("oneDNN has no bfloat16 on this host")
    model = layers(dtype)
    x = torch.randn(*rows, 48, dtype=dtype)
    expected = model(x)

    pack_linears(model)

    assert isinstance(model[0], PackedLinear)
    assert isinstance(model[1][1], PackedLinear)

    scale = expected.abs().max()
    torch.testing.assert_close(
        model(x) / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype]
    )


def test_laid_weights_are_in_memory_once():
    model = layers()
    pack_linears(model)

    assert {
        x.device.type for name, x in model.named_parameters() if "weight" in name
    } == {"meta"}
    assert [tuple(x.shape) for x in model.parameters()] == [(80, 48), (80,), (33, 80)]


@pytest.mark.parametrize(
    "model", [Own(8, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 8).half()]
)
def test_other_layers_stay_as_they_are(model):
    house = nn.Sequential(model)
    pack_linears(house)

    assert house[0] is model


def test_weights_stay_as_they_are_where_memory_is_small(monkeypatch, caplog):
    monkeypatch.setattr(linear, "available_memory", lambda: 1 << 10)
    model = layers()

    pack_linears(model)

    assert type(model[0]) is nn.Linear
    assert "linear layers take 1.3 to 4.5 times as long" in caplog.text


def test_all_workers_of_a_host_need_room_for_their_weights(monkeypatch):
    nbytes = sum(x.nbytes for x in layers().parameters() if x.dim() > 1)
    monkeypatch.setattr(linear, "available_memory", lambda: 4 * nbytes)
    model, crowded = layers(), layers()

    pack_linears(model, workers=2)
    pack_linears(crowded, workers=3)

    assert isinstance(model[0], PackedLinear)
    assert type(crowded[0]) is nn.Linear


def test_products_have_few_numbers_of_rows():
    numbers = {linear.padded_rows(rows) for rows in range(1, 2049)}

    assert len(numbers) < 64
    assert {1, 2, 15, 16, 24, 128, 144, 2048} <= numbers


def test_padding_is_an_eighth_of_the_rows_at_most():
    for rows in range(linear.EXACT_ROWS + 1, 4097):
        padded = linear.padded_rows(rows)
        assert rows <= padded < max(rows + linear.LEAST_STEP, 1.125 * rows + 1)
        assert linear.padded_rows(padded) == padded


def test_the_number_below_needs_no_padding():
    for rows in range(1, 4097):
        below = linear.unpadded_rows(rows)
        assert below <= rows <= linear.padded_rows(rows)
        assert linear.padded_rows(below) == below
        assert linear.padded_rows(below + 1) >= rows


def test_products_of_padded_rows_are_those_of_each_row():
    model = layers()
    x = torch.randn(37, 48)
    expected = model(x)

    pack_linears(model)

    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
