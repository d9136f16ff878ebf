import pytest
import torch

from disagg.codecs import get_codec
from disagg.errors import ConfigError, UnknownNameError
from disagg.page import make_raw_layout
from tests.synthetic import realistic

FP16_BYTES = 2 * 2 * 128  # K and V of one token and head, D = 128


@pytest.mark.parametrize(("n", "percent"), [(8192, 16.3), (2048, 18.3)])
def test_true_stored_size_of_two_bits_tail_included(n: int, percent: float) -> None:
    k, v = (x.half() for x in realistic(1, n, 128))
    cache = get_codec("kivi:bits=2,group=64,residual=64").compress(k, v)
    assert 100 * cache.nbytes / (n * FP16_BYTES) <= percent


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [32, 64])
def test_error_is_within_half_a_step_of_its_group(bits: int, group: int) -> None:
    k, v = (x.half() for x in realistic(2, 256, 128))
    codec = get_codec(f"kivi:bits={bits},group={group},residual=0")
    seen_k, seen_v = codec.compress(k, v).reconstruct()
    for exact, seen, axis in ((k, seen_k, 1), (v, seen_v, 2)):
        exact = exact.float().unflatten(axis, (-1, group))
        spread = exact.amax(axis + 1, keepdim=True) - exact.amin(axis + 1, keepdim=True)
        largest = exact.abs().amax(axis + 1, keepdim=True)
        step = torch.maximum(spread / (2**bits - 1), largest / 1024)
        bound = step / 2 + 2**-10 * (largest + step * 2**bits)
        assert ((seen.unflatten(axis, (-1, group)) - exact).abs() <= bound).all()


def test_the_tail_keeps_the_last_tokens_exact() -> None:
    k, v = (x.half() for x in realistic(2, 500, 64))
    seen_k, seen_v = get_codec("kivi:bits=2,group=64,residual=128").compress(k, v).reconstruct()
    assert torch.equal(seen_k[:, -128:], k[:, -128:].float())
    assert torch.equal(seen_v[:, -128:], v[:, -128:].float())
    assert not torch.equal(seen_k[:, :64], k[:, :64].float())


def test_planes_stand_in_the_documented_order() -> None:
    layout = get_codec("kivi:bits=2,group=64,residual=64").page_layout(128)
    assert [plane.name for plane in layout.planes] == [
        "k_codes", "v_codes", "k_scale", "k_zero", "v_scale", "v_zero",
    ]  # fmt: skip
    assert layout.block_bytes == 5120
    assert make_raw_layout("float16", 128).block_bytes == 16 * FP16_BYTES


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("kiwi:bits=2", UnknownNameError, "unknown codec 'kiwi'; known: .*kivi.*raw"),
        ("kivi:bit=2", UnknownNameError, "unknown option of codec kivi 'bit'; known: bits, group"),
        ("kivi:bits=3", ConfigError, "kivi:bits is 3; 2 and 4 are known"),
        ("kivi:bits=two", ConfigError, "option bits of codec kivi is 'two'; a number"),
        ("kivi:bits", ConfigError, "option 'bits' of codec kivi has no value"),
        ("kivi:bits=2,bits=4", ConfigError, "given twice"),
        ("raw:dtype=fp8", ConfigError, "raw:dtype is 'fp8'; known: model, fp16, bf16, fp32"),
    ],
)
def test_a_spec_that_cannot_be_says_what_would_be_right(
    spec: str, error: type[ConfigError], message: str
) -> None:
    with pytest.raises(error, match=message):
        get_codec(spec)


def test_a_group_that_does_not_divide_the_head_dim_is_refused() -> None:
    with pytest.raises(ConfigError, match="group=64 does not divide the head dim 80"):
        get_codec("kivi:bits=2,group=64").compress(torch.zeros(1, 9, 80), torch.zeros(1, 9, 80))
