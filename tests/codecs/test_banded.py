"""banded and sinks: what orders the channels, what stays exact, and how many bits it takes."""

from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from disagg.codecs import banded, codec_names, get_codec
from disagg.codecs.banded import Banded
from disagg.codecs.contract import (
    LEAD_UNITS,
    Prompt,
    Queries,
    lead_of,
    squares_by_unit,
    sum_lead,
)
from disagg.codecs.describe import describe
from disagg.codecs.quantized import prompt_format
from disagg.codecs.registry import CODECS
from disagg.errors import ConfigError
from disagg.kernels.reference.hadamard import read_order, read_signs
from disagg.kernels.reference.pages import DenseBlocks
from disagg.kernels.reference.quantize import quantize_fitted
from disagg.paged.compressed_kv import CompressedKV, compress
from tests.synthetic import exact_attention, gaussian, realistic, relative_error

INPUTS = Path(__file__).parents[1] / "golden" / "inputs.npz"


def order_of(segments: Tensor, codec: Banded, head_dim: int = 64) -> Tensor:
    """The order of the channels in the first of some segments: [H, D]."""
    fmt = prompt_format(codec, head_dim)
    return read_order(DenseBlocks(segments[0]), fmt.hadamard, head_dim)


def tokens(n: int, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """k, v [2, n, D] and q [6, n, D]."""
    k, v = realistic(2, n, head_dim)
    q = gaussian(6, n, head_dim, seed=n)
    return k, v, q * torch.linspace(0.5, 3, head_dim)


def by_kv_head(q: Tensor) -> Tensor:
    """Squares of q [6, n, D]: [2, 3, n, D] fp64."""
    return q.double().square().unflatten(0, (2, 3))


def assert_ranked(weights: Tensor, order: Tensor) -> None:
    """The weights fall in this order, but for a rounding."""
    ranked = weights.gather(1, order)
    before, after = ranked[:, :-1], ranked[:, 1:]
    assert (after <= before * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    ("bits", "most"),
    [
        (2, 2.5),
        (3, 3.05),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_a_number_with_scales_zeros_and_order(bits, most, head_dim):
    row = describe(f"banded:bits={bits}", 4, head_dim, 4096)
    assert row.bits_per_element <= most


@pytest.mark.parametrize("n", [300, 600, 1400])
def test_channels_are_ordered_by_squares_of_q_times_ranges_of_k(n):
    codec = Banded(bits=2, sink=64)
    k, v, q = tokens(n)
    cache = compress(codec, k, v, q=q)

    end = min(n, 576)
    squares = by_kv_head(q[:, 64:end]).mean((1, 2))
    whole_pages = k[:, 64 : end - end % 64].double()
    pages = whole_pages.unflatten(1, (-1, 64))
    ranges = pages.amax(2) - pages.amin(2)
    weights = squares * ranges.square().mean(1)
    for run in cache.runs():
        order = order_of(run.segments, codec)
        channels = order[0].tolist()
        assert sorted(channels) == list(range(64))
        assert_ranked(weights, order)


def test_tokens_outside_the_lead_order_nothing():
    codec = Banded()
    k, v, q = tokens(1400)
    cache = compress(codec, k, v, q=q)
    first_run = cache.runs()[0]
    order = order_of(first_run.segments, codec)

    for x in (k, q):
        x[:, :64] *= 7
        x[:, 576:] = torch.randn_like(x[:, 576:])
    cache = compress(codec, k, v, q=q)
    last_run = cache.runs()[-1]
    assert torch.equal(order_of(last_run.segments, codec), order)


@pytest.mark.parametrize("n", [0, 30, 100, 191])
def test_a_prompt_below_a_page_leaves_sums_for_the_first_page(n):
    codec = Banded()
    k, v, q = tokens(400)
    cache = compress(codec, k[:, :n], v[:, :n], q=q[:, :n])
    assert not cache.runs()
    cache.append(k[:, n:], v[:, n:])
    (run,) = cache.runs()  # all pages are of one segment

    squares = torch.ones(2, 64)
    if n:
        first, end = lead_of(n)
        squares = by_kv_head(q[:, first:end]).sum((1, 2))
    page = k[:, 64:128].half().double()
    ranges = page.amax(1) - page.amin(1)
    assert_ranked(squares * ranges.square(), order_of(run.segments, codec))


def test_decoded_pages_keep_the_order_of_the_first_segment():
    codec = Banded()
    k, v, q = tokens(1500)
    cache = compress(codec, k[:, :1200], v[:, :1200], q=q[:, :1200])
    first_run = cache.runs()[0]
    order = order_of(first_run.segments, codec)

    cache.append(k[:, 1200:], v[:, 1200:])
    runs = cache.runs()
    num_pages = [run.blocks.shape[0] for run in runs]
    assert num_pages == [8, 8, 5]
    for run in runs:
        assert torch.equal(order_of(run.segments, codec), order)


@given(
    chunks=st.lists(
        st.integers(1, 300),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 5),
)
def test_sums_of_squares_are_the_same_in_any_chunks(chunks, seed):
    total = sum(chunks)
    q = 3 * gaussian(2, total, 16, seed=seed)
    parts = torch.zeros(LEAD_UNITS, 1, 16, dtype=torch.float64)
    before = 0
    for count in chunks:
        chunk = q[:, before : before + count]
        parts += squares_by_unit(chunk, 1, before)
        before += count

    sums = sum_lead(parts, total)
    assert torch.equal(sums, Queries.of(q, 1, total).squares)
    first, end = lead_of(total)
    lead = q[:, first:end].double()
    expected = lead.square().sum((0, 1))
    assert torch.allclose(sums, expected, rtol=1e-4)


def test_signs_differ_by_layer_and_head_and_nothing_else():
    codec = Banded()
    k, v, _ = tokens(256)
    fmt = prompt_format(codec, 64)

    def signs(layer: int) -> Tensor:
        prompt = Prompt(256, k)
        encoded = codec.encode(k, v, 64, layer, prompt, None)
        segment = DenseBlocks(encoded.segments[0])
        return read_signs(segment, fmt.hadamard, 64)

    assert torch.equal(signs(3), signs(3))
    first_layers = torch.cat([signs(layer) for layer in range(4)])
    assert len(first_layers.unique(dim=0)) == 8
    many = torch.cat([signs(layer) for layer in range(30)])
    assert many.mean().abs() < 0.1


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("factor", [1.0, 3000.0, 1e-4])
def test_no_code_is_further_off_than_the_docstring_says(bits, factor):
    kv = torch.cat(realistic(2, 2048, 64))
    pages = kv.unflatten(1, (-1, 64)).flatten(0, 1)
    x = (pages * factor).half().float()

    codes, scale, zero = (y.float() for y in quantize_fitted(x, 64, bits))
    decoded = (codes + zero) * scale
    off = (decoded - x).abs()
    largest = x.abs().amax(1, keepdim=True)
    bound = 2 ** (bits + 1) * scale + 2**-10 * largest
    assert (off <= bound).all()


@pytest.mark.parametrize(
    ("bits", "digest"),
    [
        (2, "66ae4965c2604cd8"),
        (3, "8ef4cc9e3a2ceac5"),
    ],
)
def test_the_bytes_of_a_page_and_a_segment_are_what_they_were(bits, digest):
    with np.load(INPUTS) as arrays:
        k, v = (torch.from_numpy(arrays[name])[0, :, :256] for name in "kv")
    keys = torch.cat([k, k], 1)[:, :320]
    prompt = Prompt(320, keys)
    codec = Banded(bits=bits)
    encoded = codec.encode(k, v, 64, 1, prompt, None)

    blake = blake2b(encoded.blocks.numpy().tobytes(), digest_size=8)
    blake.update(encoded.segments.numpy().tobytes())
    assert blake.hexdigest() == digest


SINKING = ["kivi", "banded", "gear", "gear-l", "kcvt", "pertoken", "int8"]


@pytest.mark.parametrize("name", SINKING)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 200, 700])
def test_the_first_tokens_stay_exact_in_front_of_the_pages(name, n):
    k, v = realistic(2, n + 70, 64, dtype=torch.float16)
    codec = get_codec(f"{name}:sink=64")
    cache = compress(codec, k[:, :n], v[:, :n])
    for more in (0, 1, 69):
        done = cache.num_tokens + more
        new = slice(cache.num_tokens, done)
        cache.append(k[:, new], v[:, new])

        sink = min(done, 64)
        for rebuilt, exact in zip(cache.reconstruct(), (k, v), strict=True):
            assert torch.equal(rebuilt[:, :64], exact[:, :sink].float())


def page_bytes(cache: CompressedKV) -> bytes:
    return b"".join(run.blocks.numpy().tobytes() for run in cache.runs())


@pytest.mark.parametrize("name", [name for name in SINKING if name != "banded"])
def test_pages_after_a_sink_equal_those_of_a_prompt_without_it(name):
    k, v = realistic(2, 700, 64)
    cache = compress(f"{name}:sink=64", k, v)
    whole = page_bytes(cache)
    cache = compress(name, k[:, 64:], v[:, 64:])
    behind = page_bytes(cache)

    assert len(whole) == len(behind) > 0
    if "gear" not in name:  # its power iterations start at a seed of the position
        assert whole == behind


@pytest.mark.parametrize(
    ("window", "sink"),
    [
        (None, 64),
        (300, 0),
    ],
)
def test_layers_with_a_window_have_no_sink(window, sink):
    group = get_codec("banded").layer_group((0,), 1, 64, "float16", window)
    assert group.sink == sink


def test_a_codec_without_sinks_says_why():
    for name in codec_names():
        if name in SINKING:
            assert not CODECS[name].no_sink
            continue
        with pytest.raises(ConfigError, match=CODECS[name].no_sink):
            get_codec(f"{name}:sink=64")
    with pytest.raises(ConfigError, match="0 and 64"):
        get_codec("int8:sink=16")


@pytest.mark.parametrize(
    ("spec", "is_named"),
    [
        ("kivi:sink=0", False),
        ("kivi:sink=64", True),
        ("banded:sink=64", False),
        ("banded:sink=0", True),
    ],
)
def test_a_spec_names_a_sink_where_it_is_not_the_default(spec, is_named):
    _, _, option = spec.partition(":")
    assert get_codec(spec).spec.endswith(option) == is_named


def test_ranges_of_channels_are_computed_without_a_host_sync():
    # a tensor on meta has no numbers to ask for
    k = torch.empty(2, 640, 64, dtype=torch.float16, device="meta")
    assert banded._ranges(Prompt(640, k)).shape == (2, 64)


@pytest.mark.parametrize("name", SINKING)
def test_queries_in_the_pages_behind_a_sink_see_no_later_token(name):
    n, width = 320, 200
    cache = compress(get_codec(f"{name}:sink=64"), *realistic(1, n, 64))
    q = gaussian(2, width, 64, seed=1)
    o = cache.attend(q)

    for i in (0, 99, width - 1):
        end = n - width + i + 1
        k, v = (x[:, :end] for x in cache.reconstruct())
        expected = exact_attention(q[:, i], k, v, 64**-0.5)
        assert relative_error(o[:, i], expected) < 1e-3
