"""What sealing while decoding does to runs, segments and layouts: the documented state machine."""

from dataclasses import replace

import pytest
import torch

from disagg.codecs import codec_names, get_codec
from disagg.codecs.contract import Encoded
from disagg.errors import RequestError
from disagg.kernels.cpu.library import STRIP_PAGES
from disagg.paged.compressed_kv import CompressedKV, compress
from tests.synthetic import exact_attention, realistic, relative_error


def grown(spec: str, prompt: int, total: int) -> CompressedKV:
    """A prompt and then tokens one block after another."""
    k, v = realistic(2, total, 64)
    cache = compress(get_codec(spec), k[:, :prompt], v[:, :prompt], 2, q=k[:, :8])
    cache.append(k[:, prompt:], v[:, prompt:])
    return cache


RANKS = "rank=4,decode_rank=4"


@pytest.mark.parametrize(
    "spec",
    ["kcvt", f"gear-l:{RANKS}", f"gear:backbone=kivi,{RANKS}", "ott:group=64,rank=2"],
)
def test_pages_sealed_while_decoding_are_one_run_however_many(spec: str) -> None:
    cache = grown(spec, 384, 1000)
    prompt, flushed = cache.runs()
    tokens, tail = cache.group.page.tokens, cache.codec.tail_tokens
    assert prompt.blocks.shape[0] == (384 - tail) // tokens
    assert flushed.blocks.shape[0] == (1000 - tail) // tokens - prompt.blocks.shape[0]
    assert prompt.segments is not None
    assert flushed.segments is None
    same = cache.group.layer_bytes(cache.group.page) + cache.group.layer_bytes(
        cache.group.segment
    )
    assert cache.group.layer_bytes(cache.group.flush_page) == same


def test_pages_of_decoquant_sealed_while_decoding_keep_the_first_rotation() -> None:
    cache = grown("decoquant", 2200, 2600)
    first, second, later = cache.runs()
    assert (first.blocks.shape[0], second.blocks.shape[0], later.blocks.shape[0]) == (
        32,
        2,
        6,
    )
    assert torch.equal(first.segments, later.segments)
    assert not torch.equal(first.segments, second.segments)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pages_of_decoquant_that_are_large_beside_its_rotation_stay_finite(
    bits: int,
) -> None:
    k, v = realistic(2, 200, 64)
    k[:, :64], v[:, :64], k[:, 64:], v[:, 64:] = (
        1e-6 * k[:, :64],
        1e-6 * v[:, :64],
        6e4,
        -6e4,
    )
    cache = compress(get_codec(f"decoquant:bits={bits}"), k[:, :64], v[:, :64])
    cache.append(k[:, 64:], v[:, 64:])
    assert torch.isfinite(torch.stack(cache.reconstruct())).all()
    assert torch.isfinite(cache.attend(torch.ones(2, 64))).all()


@pytest.mark.parametrize(
    ("head_dim", "prompt"), [(64, 64), (128, 64), (128, 143), (256, 143)]
)
def test_a_rotation_of_fewer_tokens_than_channels_serves_what_is_decoded(
    head_dim, prompt
) -> None:
    k, v = realistic(2, prompt + 200, head_dim)
    cache = compress(
        get_codec(f"decoquant:bits=8,block={head_dim}"), k[:, :prompt], v[:, :prompt]
    )
    cache.append(k[:, prompt:], v[:, prompt:])
    q = torch.randn(4, head_dim, generator=torch.Generator().manual_seed(0))
    seen = cache.reconstruct()
    assert relative_error(seen[0], k) <= 0.02
    wanted = exact_attention(q, *seen, head_dim**-0.5)
    assert relative_error(cache.attend(q), wanted) <= cache.codec.attend_error


def test_pages_of_gear_sealed_while_decoding_have_the_smaller_rank() -> None:
    cache = grown("gear-l:bits=4,rank=4,decode_rank=2", 128, 256)
    group = cache.group
    assert group.flush_page.plane("k_low").shape == (64, 2)
    assert group.flush_page.plane("k_basis").shape == (64, 2)
    assert [run.flush for run in cache.runs()] == [False, True]
    assert cache.runs()[1].blocks.shape[2] == group.flush_page.block_bytes


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float16), (torch.int32, torch.int32)]
)
def test_k_and_v_that_cannot_be_appended_are_refused_before_a_page_is_sealed(
    dtypes,
) -> None:
    cache = grown("kivi:residual=0", 60, 63)
    k, v = (
        x[:, -1:].to(dtype)
        for x, dtype in zip(realistic(2, 64, 64), dtypes, strict=True)
    )
    with pytest.raises(RequestError, match="one floating-point dtype is wanted"):
        cache.append(k, v)
    assert not cache.runs()
    with pytest.raises(RequestError, match="one floating-point dtype is wanted"):
        compress(cache.codec, k, v)


@pytest.mark.parametrize("spec", ["kcvt", "gear:bits=2,backbone=kivi", "decoquant"])
def test_a_sealed_page_holds_what_flush_makes_of_its_tokens(spec: str) -> None:
    k, v = (x.half() for x in realistic(2, 320, 64))
    codec = get_codec(spec)
    cache = compress(codec, k[:, :192], v[:, :192], layer=5)
    before = cache.runs()[-1].segments if spec == "decoquant" else None
    first = cache.group.sealed(192)
    cache.append(k[:, 192:], v[:, 192:])
    part = slice(first, first + 64)
    nothing = torch.zeros(0, dtype=torch.uint8)
    wanted = codec.flush(k[:, part], v[:, part], first, 5, Encoded(nothing, before))
    blocks = torch.cat(
        [block for run in cache.runs() for block in run.blocks.flatten(1)]
    )
    start = (first // 64) * cache.group.page.block_bytes * 2
    assert torch.equal(
        blocks[start : start + wanted.blocks.numel()], wanted.blocks.flatten()
    )


@pytest.mark.parametrize(
    "spec", [*sorted({*codec_names()} - {"banded"}), "banded:sink=0"]
)
@pytest.mark.parametrize("window", [50, 200, 500])
def test_a_window_hides_tokens_wherever_they_lie(spec: str, window: int) -> None:
    cache = grown(spec, 400, 700)
    assert not cache.group.sink  # groups with a window have none
    cache.group = replace(cache.group, window=window)
    q = torch.randn(4, 64, generator=torch.Generator().manual_seed(6))
    visible = cache.present() & (torch.arange(700) >= 700 - window)
    wanted = exact_attention(q, *cache.reconstruct(), 64**-0.5, visible)
    assert relative_error(cache.attend(q), wanted) <= cache.codec.attend_error


@pytest.mark.parametrize("spec", ["raw", "int8", "kivi:bits=4", "fp8", "pertoken"])
def test_what_was_dropped_behind_a_window_changes_no_bit_of_an_answer(
    spec: str,
) -> None:
    cache, pages = grown(spec, 700, 900), set()
    cache.group = replace(cache.group, window=400)
    q = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(7))
    answers = cache.attend(q)  # the first of them sees most
    for tokens in range(0, cache.group.dropped(900 - 3), cache.group.page.tokens):
        cache._arena.release(cache._state.drop(tokens // cache.group.page.tokens))
        assert torch.equal(cache.attend(q), answers)
        assert torch.equal(cache.attend(q[:, -1]), answers[:, -1])
        pages.add(cache._state.dropped % STRIP_PAGES)
    assert len(pages) == STRIP_PAGES
