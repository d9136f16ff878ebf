"""What sealing while decoding does to runs, segments and layouts: the documented state machine."""

from dataclasses import replace

import pytest
import torch

from disagg.codecs import codec_names, get_codec
from disagg.codecs.contract import Encoded
from disagg.errors import RequestError
from disagg.kernels.cpu.library import STRIP_PAGES
from disagg.paged.compressed_kv import CompressedKV, compress
from tests.synthetic import (
    exact_attention,
    gaussian,
    prompt_and_decode,
    realistic,
    relative_error,
)


def make_cache(spec: str, prompt: int, total: int) -> CompressedKV:
    """A prompt, and then the tokens up to `total`, decoded."""
    k, v = realistic(2, total, 64)
    return prompt_and_decode(spec, k, v, prompt, layer=2, q=k[:, :8])


RANKS = "rank=4,decode_rank=4"


@pytest.mark.parametrize(
    "spec",
    ["kcvt", f"gear-l:{RANKS}", f"gear:backbone=kivi,{RANKS}", "ott:group=64,rank=2"],
)
def test_pages_sealed_while_decoding_are_one_run(spec: str) -> None:
    cache = make_cache(spec, prompt=384, total=1000)
    group, tail = cache.group, cache.codec.tail_tokens
    prompt_pages = (384 - tail) // group.page.tokens
    all_pages = (1000 - tail) // group.page.tokens

    prompt, flushed = cache.runs()
    assert prompt.blocks.shape[0] == prompt_pages
    assert flushed.blocks.shape[0] == all_pages - prompt_pages
    assert prompt.segments is not None
    assert flushed.segments is None

    page_and_segment = group.layer_bytes(group.page) + group.layer_bytes(group.segment)
    assert group.layer_bytes(group.flush_page) == page_and_segment


def test_decoded_pages_of_decoquant_keep_the_first_rotation() -> None:
    cache = make_cache("decoquant", prompt=2200, total=2600)

    first, second, decoded = cache.runs()
    assert first.blocks.shape[0] == 32
    assert second.blocks.shape[0] == 2
    assert decoded.blocks.shape[0] == 6
    assert torch.equal(first.segments, decoded.segments)
    assert not torch.equal(first.segments, second.segments)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_decoded_values_large_beside_the_rotation_stay_finite(bits: int) -> None:
    k, v = realistic(2, 200, 64)
    k[:, :64] *= 1e-6
    v[:, :64] *= 1e-6
    k[:, 64:] = 6e4
    v[:, 64:] = -6e4

    cache = prompt_and_decode(f"decoquant:bits={bits}", k, v, prompt=64)
    new_k, new_v = cache.reconstruct()
    assert torch.isfinite(new_k).all()
    assert torch.isfinite(new_v).all()
    o = cache.attend(torch.ones(2, 64))
    assert torch.isfinite(o).all()


@pytest.mark.parametrize(
    ("head_dim", "prompt"),
    [
        (64, 64),
        (128, 64),
        (128, 143),
        (256, 143),
    ],
)
def test_a_rotation_fitted_to_few_tokens_serves_decoded_ones(head_dim, prompt) -> None:
    k, v = realistic(2, prompt + 200, head_dim)
    cache = prompt_and_decode(f"decoquant:bits=8,block={head_dim}", k, v, prompt)
    q = gaussian(4, head_dim, seed=0)

    new_k, new_v = cache.reconstruct()
    assert relative_error(new_k, k) <= 0.02
    expected = exact_attention(q, new_k, new_v, head_dim**-0.5)
    assert relative_error(cache.attend(q), expected) <= cache.codec.attend_error


def test_decoded_pages_of_gear_have_the_smaller_rank() -> None:
    cache = make_cache("gear-l:bits=4,rank=4,decode_rank=2", prompt=128, total=256)
    flush_page = cache.group.flush_page
    assert flush_page.plane("k_low").shape == (64, 2)
    assert flush_page.plane("k_basis").shape == (64, 2)

    prompt, flushed = cache.runs()
    assert not prompt.flush
    assert flushed.flush
    assert flushed.blocks.shape[2] == flush_page.block_bytes


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float16),
        (torch.int32, torch.int32),
    ],
)
def test_k_and_v_of_other_dtypes_are_refused_before_a_seal(dtypes) -> None:
    cache = make_cache("kivi:residual=0", prompt=60, total=63)
    k, v = realistic(2, 64, 64)
    k = k[:, -1:].to(dtypes[0])
    v = v[:, -1:].to(dtypes[1])

    with pytest.raises(RequestError, match="expected one floating-point dtype"):
        cache.append(k, v)
    assert not cache.runs()
    with pytest.raises(RequestError, match="expected one floating-point dtype"):
        compress(cache.codec, k, v)


@pytest.mark.parametrize("spec", ["kcvt", "gear:bits=2,backbone=kivi", "decoquant"])
def test_a_sealed_page_holds_what_flush_makes_of_its_tokens(spec: str) -> None:
    k, v = realistic(2, 320, 64, dtype=torch.float16)
    codec = get_codec(spec)
    cache = compress(codec, k[:, :192], v[:, :192], layer=5)
    segments = cache.runs()[-1].segments if spec == "decoquant" else None
    first = cache.group.sealed(192)
    cache.append(k[:, 192:], v[:, 192:])

    tokens = slice(first, first + 64)
    before = Encoded(torch.zeros(0, dtype=torch.uint8), segments)
    flushed = codec.flush(k[:, tokens], v[:, tokens], first, 5, before)
    expected = flushed.blocks

    pages = [page for run in cache.runs() for page in run.blocks.flatten(1)]
    start = (first // 64) * cache.group.page.block_bytes * 2
    stored = torch.cat(pages)[start : start + expected.numel()]
    assert torch.equal(stored, expected.flatten())


@pytest.mark.parametrize(
    "spec", [*sorted({*codec_names()} - {"banded"}), "banded:sink=0"]
)
@pytest.mark.parametrize("window", [50, 200, 500])
def test_a_window_hides_tokens_wherever_they_lie(spec: str, window: int) -> None:
    cache = make_cache(spec, prompt=400, total=700)
    assert not cache.group.sink  # groups with a window have none
    cache.group = replace(cache.group, window=window)
    q = gaussian(4, 64, seed=6)

    visible = cache.present() & (torch.arange(700) >= 700 - window)
    expected = exact_attention(q, *cache.reconstruct(), 64**-0.5, visible)
    assert relative_error(cache.attend(q), expected) <= cache.codec.attend_error


@pytest.mark.parametrize("spec", ["raw", "int8", "kivi:bits=4", "fp8", "pertoken"])
def test_dropped_pages_before_a_window_change_no_bit(spec: str) -> None:
    cache = make_cache(spec, prompt=700, total=900)
    cache.group = replace(cache.group, window=400)
    q = gaussian(4, 3, 64, seed=7)
    answers = cache.attend(q)  # the first query sees most

    last_answer = answers[:, -1]
    places_in_strip = set()
    page_tokens = cache.group.page.tokens
    for pages in range(cache.group.dropped(900 - 3) // page_tokens):
        freed = cache._state.drop(pages)
        cache._arena.release(freed)
        assert torch.equal(cache.attend(q), answers)
        assert torch.equal(cache.attend(q[:, -1]), last_answer)
        places_in_strip.add(cache._state.dropped % STRIP_PAGES)
    assert len(places_in_strip) == STRIP_PAGES
