"""Weights of 8 and 4 bits: how far products are off, which layers have them, what is refused."""

import math

import pytest
import torch
from torch import nn

from disagg.cli.models import _facts
from disagg.config import ModelConfig
from disagg.errors import ConfigError, UnknownNameError
from disagg.model import quantized_linear
from disagg.model.capacity import check_model
from disagg.model.describe import describe_model
from disagg.model.forward import ModuleForward, forward_of
from disagg.model.linear import PackedLinear
from disagg.model.llama import LlamaForward, attend_to_all
from disagg.model.quantized_linear import (
    LEAST_NUMBERS,
    Int4Linear,
    Int8Linear,
    check_weights_setting,
    quantize_linears,
    quantized_part,
    usable_weights,
)
from disagg.model.runner import Runner
from disagg.model.weights import load_model
from tests.model.tiny import save_tiny

KINDS = {"int8": Int8Linear, "int4": Int4Linear}
ERRORS = {"int8": 0.02, "int4": 0.1}  # of random products, in parts of their norm
FLAGS = frozenset({"avx512f", "avx512_vnni"})
TOKENS = torch.arange(3, 20)
needs_units = pytest.mark.skipif(
    usable_weights("cpu", "float32") != ("int4", "int8"),
    reason="this processor has no units for these weights",
)


@pytest.fixture
def all_sizes(monkeypatch):
    """Layers of any size are rounded."""
    for weights in LEAST_NUMBERS:
        monkeypatch.setitem(LEAST_NUMBERS, weights, 0)


@pytest.fixture
def capable(monkeypatch):
    """This processor and torch can do all."""
    monkeypatch.setattr(quantized_linear, "processor_flags", lambda: FLAGS)
    monkeypatch.setattr(quantized_linear, "_has_operators", lambda _: True)


def linear(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(64, 96, bias).to(dtype).requires_grad_(False)


def error_of(output, expected):
    return float((output - expected).float().norm() / expected.float().norm())


@needs_units
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(1,), (2,), (1, 7), (2, 3, 40)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_off_by_a_known_part(weights, dtype, rows, bias):
    plain = linear(dtype, bias)
    x = torch.randn(*rows, 64, dtype=dtype)
    expected = plain(x)

    output = KINDS[weights](plain)(x)

    assert output.shape == expected.shape
    assert output.dtype == dtype
    assert error_of(output, expected) < ERRORS[weights]


@needs_units
def test_int8_rounds_each_token_by_itself():
    layer = Int8Linear(linear())
    x = torch.randn(5, 64)
    x[3] *= 1000

    alone = [layer(x[row : row + 1])[0] for row in range(5)]

    assert torch.equal(layer(x), torch.stack(alone))


@needs_units
@pytest.mark.parametrize("least", [0, math.inf])
def test_int4_weights_are_the_same_for_few_and_many_tokens(least, monkeypatch):
    monkeypatch.setitem(LEAST_NUMBERS, "int8", least)
    layer = Int4Linear(linear())
    x = torch.randn(9, 64)

    few = torch.cat([layer(x[row : row + 1]) for row in range(9)])

    assert isinstance(layer._many, PackedLinear if least else Int8Linear)
    assert error_of(layer(x), few) < (1e-5 if least else ERRORS["int8"])


@needs_units
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_that_are_not_finite_stay_so(weights, value):
    layer = KINDS[weights](linear())
    x = torch.randn(2, 64)
    x[1, 5] = value

    output = layer(x)

    assert output[0].isfinite().all()
    assert not output[1].isfinite().any()


@needs_units
@pytest.mark.parametrize("weights", KINDS)
def test_a_layer_of_zeros_gives_zeros(weights):
    plain = linear(bias=False)
    plain.weight.zero_()

    output = KINDS[weights](plain)(torch.randn(3, 64))

    assert not output.any()


@needs_units
@pytest.mark.parametrize("weights", KINDS)
def test_large_layers_alone_are_rounded(weights, monkeypatch):
    monkeypatch.setitem(LEAST_NUMBERS, weights, 64 * 96)
    model = nn.ModuleDict(
        {
            "large": linear(),
            "small": nn.Linear(64, 95),
            "lm_head": linear(),
            "dt_proj": linear(),
        }
    ).requires_grad_(False)

    quantize_linears(model, weights)

    assert isinstance(model["large"], KINDS[weights])
    others = {type(layer) for name, layer in model.items() if name != "large"}
    assert others == {nn.Linear}
    assert quantized_part(model) == "1 of 4 linear layers (25.1% of their numbers)"


@needs_units
def test_shapes_that_int4_does_not_take_get_int8(all_sizes):
    model = nn.Sequential(nn.Linear(40, 96), nn.Linear(96, 33)).requires_grad_(False)

    quantize_linears(model, "int4")

    assert {type(layer) for layer in model} == {Int8Linear}


@needs_units
@pytest.mark.parametrize("weights", KINDS)
def test_fused_layers_have_the_weights_of_the_modules(weights, all_sizes, tmp_path):
    info = describe_model(str(save_tiny("llama", tmp_path)), "float32")

    with torch.inference_mode():
        own = forward_of(load_model(info, "cpu").eval(), weights=weights)
        modules = ModuleForward(load_model(info, "cpu").eval())
        quantize_linears(modules, weights)
        outputs = [x(TOKENS, TOKENS, attend_to_all, None) for x in (own, modules)]

    assert isinstance(own, LlamaForward)
    assert all(isinstance(layer.mlp.down, KINDS[weights]) for layer in own.layers)
    assert error_of(*outputs) < 0.02  # inputs on the edge of two codes


@needs_units
def test_models_with_other_weights_have_other_fingerprints(tiny, all_sizes):
    runners = [Runner.load(str(tiny), weights=x) for x in (None, "int8", "int4")]

    assert len({runner.fingerprint for runner in runners}) == 3
    again = Runner.load(str(tiny), weights="int4")
    assert again.fingerprint == runners[2].fingerprint
    assert again.weights.startswith("int4 in 12 of 13 linear layers")


@needs_units
def test_a_model_of_small_layers_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"no linear layer .* 6,000,000 numbers"):
        Runner.load(str(tiny), weights="int8")


@needs_units
def test_memory_without_room_for_all_workers_is_refused(all_sizes, monkeypatch):
    nbytes = Int8Linear.nbytes_of(linear())
    monkeypatch.setattr(quantized_linear, "available_memory", lambda: 4 * nbytes)
    quantize_linears(nn.Sequential(linear()), "int8", workers=2)

    with pytest.raises(ConfigError, match=r"3 workers of this host.* fewer workers"):
        quantize_linears(nn.Sequential(linear()), "int8", workers=3)


@needs_units
@pytest.mark.parametrize("least", [0, math.inf])
def test_copies_take_the_bytes_that_are_said(least, monkeypatch):
    monkeypatch.setitem(LEAST_NUMBERS, "int8", least)
    plain = linear(torch.bfloat16)
    layer = Int4Linear(plain)

    copies = [layer._packed, layer._scales]
    # a packed layer keeps its numbers where torch does not count them
    many = 64 * 96 * (2 if least else 1)

    assert sum(x.nbytes for x in copies) + many == Int4Linear.nbytes_of(plain)


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        ("cuda", "bfloat16", "for CPUs, and the device is cuda; expected null"),
        ("cpu", "float16", "dtype float16; expected float32 or bfloat16"),
    ],
)
def test_devices_and_dtypes_without_them_are_refused(
    device, dtype, reason, weights, capable
):
    with pytest.raises(ConfigError, match=f"model.weights is {weights}.* {reason}"):
        check_weights_setting(weights, device, dtype)


@pytest.mark.parametrize(
    ("flags", "usable"),
    [
        ({"avx2"}, ()),
        ({"avx2", "avx_vnni"}, ("int8",)),
        ({"avx512f"}, ("int4",)),
        (FLAGS, ("int4", "int8")),
    ],
)
def test_processors_take_what_they_have_units_for(flags, usable, capable, monkeypatch):
    monkeypatch.setattr(quantized_linear, "processor_flags", lambda: flags)

    assert usable_weights("cpu", "bfloat16") == usable


def test_models_check_names_what_this_processor_takes(
    tiny, capable, all_sizes, monkeypatch
):
    monkeypatch.setattr(quantized_linear, "processor_flags", lambda: {"avx512f"})

    fit = check_model(str(tiny))

    assert fit.cpu_weights == ("int4",)
    assert any("takes model.weights int4" in line for line in _facts(fit))


def test_models_check_names_no_weights_for_a_model_of_small_layers(
    tiny, capable, monkeypatch
):
    monkeypatch.setattr(quantized_linear, "processor_flags", lambda: FLAGS)

    assert check_model(str(tiny)).cpu_weights == ()


def test_a_processor_without_units_is_refused(capable, monkeypatch):
    monkeypatch.setattr(quantized_linear, "processor_flags", frozenset)

    with pytest.raises(ConfigError, match="has none of amx_int8, avx512_vnni"):
        check_weights_setting("int8", "cpu", "bfloat16")


def test_a_torch_without_the_operators_is_refused(capable, monkeypatch):
    monkeypatch.setattr(quantized_linear, "_has_operators", lambda _: False)

    with pytest.raises(ConfigError, match=r"torch .* has no onednn::qlinear_pointwise"):
        check_weights_setting("int8", "cpu", "bfloat16")


def test_other_weights_are_unknown():
    with pytest.raises(UnknownNameError, match=r"model\.weights 'int3'.*int4, int8"):
        ModelConfig(weights="int3")
