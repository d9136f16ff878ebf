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
from tests.synthetic import exact_attention, realistic, relative_error

INPUTS = Path(__file__).parents[1] / "golden" / "inputs.npz"


def order_of(segments: Tensor | None, codec: Banded, head_dim: int) -> Tensor:
    """The order of the channels in the first of some segments: [H, D]."""
    fmt = prompt_format(codec, head_dim)
    return read_order(DenseBlocks(segments[0]), fmt.hadamard, head_dim)


def tokens(n: int, head_dim: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """k, v [2, n, D] and q [6, n, D]."""
    q = torch.randn(6, n, head_dim, generator=torch.Generator().manual_seed(n))
    return *realistic(2, n, head_dim), q * torch.linspace(0.5, 3, head_dim)


@pytest.mark.parametrize(("bits", "most"), [(2, 2.5), (3, 3.05)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bits_a_number_with_scales_zeros_and_order(bits, most, head_dim):
    assert describe(f"banded:bits={bits}", 4, head_dim, 4096).bits_per_element <= most


@pytest.mark.parametrize("n", [300, 600, 1400])
def test_channels_are_ordered_by_mean_q_squared_times_mean_squared_range(n):
    codec = Banded(bits=2, sink=64)
    k, v, q = tokens(n)
    cache = compress(codec, k, v, q=q)
    end = min(n, 576)
    squares = q[:, 64:end].double().square().view(2, 3, -1, 64).mean((1, 2))
    pages = k[:, 64 : end - end % 64].double().view(2, -1, 64, 64)
    weights = squares * (pages.amax(2) - pages.amin(2)).square().mean(1)
    for run in cache.runs():
        order = order_of(run.segments, codec, 64)
        assert sorted(order[0].tolist()) == list(range(64))
        ranked = weights.gather(1, order)
        assert (ranked[:, 1:] <= ranked[:, :-1] * (1 + 1e-5)).all()


def test_tokens_outside_the_lead_order_nothing():
    codec = Banded()
    k, v, q = tokens(1400)
    one = order_of(compress(codec, k, v, q=q).runs()[0].segments, codec, 64)
    for x in (k, q):
        x[:, :64] *= 7
        x[:, 576:] = torch.randn_like(x[:, 576:])
    other = order_of(compress(codec, k, v, q=q).runs()[-1].segments, codec, 64)
    assert torch.equal(one, other)


@pytest.mark.parametrize("n", [0, 30, 100, 191])
def test_a_prompt_without_a_page_leaves_sums_for_the_first_that_decoding_seals(n):
    codec = Banded()
    k, v, q = tokens(400)
    cache = compress(codec, k[:, :n], v[:, :n], q=q[:, :n])
    assert not cache.runs()
    cache.append(k[:, n:], v[:, n:])
    (run,) = cache.runs()  # all pages are of one segment
    first, end = lead_of(n)
    squares = (
        q[:, first:end].double().square().view(2, 3, -1, 64).sum((1, 2)) if n else 1.0
    )
    page = k[:, 64:128].half().double()
    weights = squares * (page.amax(1) - page.amin(1)).square()
    ranked = weights.gather(1, order_of(run.segments, codec, 64))
    assert (ranked[:, 1:] <= ranked[:, :-1] * (1 + 1e-5)).all()


def test_pages_sealed_while_decoding_keep_the_order_of_the_first_segment():
    codec = Banded()
    k, v, q = tokens(1500)
    cache = compress(codec, k[:, :1200], v[:, :1200], q=q[:, :1200])
    before = order_of(cache.runs()[0].segments, codec, 64)
    cache.append(k[:, 1200:], v[:, 1200:])
    assert [run.blocks.shape[0] for run in cache.runs()] == [8, 8, 5]
    assert all(
        torch.equal(order_of(x.segments, codec, 64), before) for x in cache.runs()
    )


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 5))
def test_sums_of_squares_are_the_same_in_any_chunks(chunks, seed):
    total = sum(chunks)
    q = torch.randn(2, total, 16, generator=torch.Generator().manual_seed(seed)) * 3
    parts, before = torch.zeros(LEAD_UNITS, 1, 16, dtype=torch.float64), 0
    for count in chunks:
        parts += squares_by_unit(q[:, before : before + count], 1, before)
        before += count
    sums = sum_lead(parts, total)
    assert torch.equal(sums, Queries.of(q, 1, total).squares)
    first, end = lead_of(total)
    assert torch.allclose(
        sums, q[:, first:end].double().square().sum((0, 1)), rtol=1e-4
    )


def test_signs_differ_by_layer_and_head_and_nothing_else():
    codec, (k, v, _) = Banded(), tokens(256)
    fmt = prompt_format(codec, 64)

    def signs(layer: int) -> Tensor:
        segments = codec.encode(k, v, 64, layer, Prompt(256, k), None).segments
        return read_signs(DenseBlocks(segments[0]), fmt.hadamard, 64)

    assert torch.equal(signs(3), signs(3))
    assert len({tuple(row.tolist()) for layer in range(4) for row in signs(layer)}) == 8
    assert abs(float(torch.cat([signs(i) for i in range(30)]).mean())) < 0.1


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("factor", [1.0, 3000.0, 1e-4])
def test_no_code_is_further_off_than_the_docstring_says(bits, factor):
    x = torch.cat(
        [y.unflatten(1, (-1, 64)).flatten(0, 1) for y in realistic(2, 2048, 64)]
    )
    x = (x * factor).half().float()
    codes, scale, zero = (y.float() for y in quantize_fitted(x, 64, bits))
    off = ((codes + zero) * scale - x).abs()
    assert (
        off <= 2 ** (bits + 1) * scale + 2**-10 * x.abs().amax(1, keepdim=True)
    ).all()


@pytest.mark.parametrize(
    ("bits", "seen"), [(2, "66ae4965c2604cd8"), (3, "8ef4cc9e3a2ceac5")]
)
def test_the_bytes_of_a_page_and_a_segment_are_what_they_were(bits, seen):
    with np.load(INPUTS) as arrays:
        k, v = (torch.from_numpy(arrays[x])[0, :, :256] for x in "kv")
    prompt = Prompt(320, torch.cat([k, k], 1)[:, :320])
    encoded = Banded(bits=bits).encode(k, v, 64, 1, prompt, None)
    found = blake2b(encoded.blocks.numpy().tobytes(), digest_size=8)
    found.update(encoded.segments.numpy().tobytes())
    assert found.hexdigest() == seen


SINKING = ["kivi", "banded", "gear", "gear-l", "kcvt", "pertoken", "int8"]


@pytest.mark.parametrize("name", SINKING)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 200, 700])
def test_the_first_tokens_stay_exact_in_front_of_the_pages(name, n):
    k, v = (x.half() for x in realistic(2, n + 70, 64))
    cache = compress(get_codec(f"{name}:sink=64"), k[:, :n], v[:, :n])
    for more in (0, 1, 69):
        done = cache.num_tokens + more
        cache.append(k[:, cache.num_tokens : done], v[:, cache.num_tokens : done])
        for seen, exact in zip(cache.reconstruct(), (k, v), strict=True):
            assert torch.equal(seen[:, :64], exact[:, : min(done, 64)].float())


@pytest.mark.parametrize("name", [*SINKING[:1], *SINKING[2:]])
def test_behind_a_sink_pages_are_those_of_a_prompt_that_begins_there(name):
    k, v = realistic(2, 700, 64)

    def pages(cache: CompressedKV) -> bytes:
        return b"".join(run.blocks.numpy().tobytes() for run in cache.runs())

    whole = compress(get_codec(f"{name}:sink=64"), k, v)
    behind = compress(get_codec(name), k[:, 64:], v[:, 64:])
    if "gear" in name:  # power iterations start at a seed of the position
        assert len(pages(whole)) == len(pages(behind)) > 0
    else:
        assert pages(whole) == pages(behind) != b""


def test_layers_with_a_window_have_no_sink():
    for window, sink in ((None, 64), (300, 0)):
        assert (
            get_codec("banded").layer_group((0,), 1, 64, "float16", window).sink == sink
        )


def test_who_has_no_sink_says_why_and_a_spec_names_one_only_where_it_is_unusual():
    for name in codec_names():
        if name in SINKING:
            assert not CODECS[name].no_sink
            continue
        with pytest.raises(ConfigError, match=CODECS[name].no_sink):
            get_codec(f"{name}:sink=64")
    specs = ["kivi:sink=0", "kivi:sink=64", "banded:sink=64", "banded:sink=0"]
    seen = [get_codec(spec).spec.endswith(spec.partition(":")[2]) for spec in specs]
    assert seen == [False, True, False, True]
    with pytest.raises(ConfigError, match="0 and 64"):
        get_codec("int8:sink=16")


def test_ranges_of_channels_are_found_without_asking_the_host():
    k = torch.empty(
        2, 640, 64, dtype=torch.float16, device="meta"
    )  # which has no numbers to ask
    assert banded._ranges(Prompt(640, k)).shape == (2, 64)


@pytest.mark.parametrize("name", SINKING)
def test_queries_that_stand_in_the_pages_behind_a_sink_see_nothing_of_the_future(name):
    n, width = 320, 200
    cache = compress(get_codec(f"{name}:sink=64"), *realistic(1, n, 64))
    q = torch.randn(2, width, 64, generator=torch.Generator().manual_seed(1))
    found = cache.attend(q)
    for i in (0, 99, width - 1):
        seen = (x[:, : n - width + i + 1] for x in cache.reconstruct())
        expected = exact_attention(q[:, i], *seen, 64**-0.5)
        assert relative_error(found[:, i], expected) < 1e-3
