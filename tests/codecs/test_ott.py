"""Outlier token tracing: which tokens stay exact, and what attention sees of the others."""

import pytest
import torch

from disagg.codecs import get_codec
from disagg.codecs.exact import exact_format, slots_format
from disagg.kernels.formats import POOL, RETIRED
from disagg.kernels.reference.kept import KeptSlots, view_kept
from disagg.kernels.reference.pages import DenseBlocks
from disagg.paged.compressed_kv import CompressedKV, compress
from tests.codecs.test_golden import golden
from tests.synthetic import (
    exact_attention,
    gaussian,
    prompt_and_decode,
    realistic,
    relative_error,
)

SPEC = "ott:bits=2,group=128,residual=32,outliers=3,aux=32,skip_layers=0"


def slots_of(cache: CompressedKV) -> KeptSlots:
    (run,) = cache.runs()
    side = slots_format(cache.group.side)
    raw = exact_format(cache.group.raw)
    return view_kept(run.side, run.kept_pages, side, raw)


def positions(slots: KeptSlots, head: int, state: int) -> list[int]:
    in_state = slots.states[head] == state
    return sorted(slots.positions[head][in_state].tolist())


def make_golden_cache() -> CompressedKV:
    """Prefill of 500 tokens at once, then 200 one by one."""
    paper = golden("ott_g128_r32_n3_oneshot")
    k, v = paper["k"][0], paper["v"][0]
    return prompt_and_decode(SPEC, k, v, prompt=500)


def test_pools_are_those_of_the_paper_s_algorithm() -> None:
    paper = golden("ott_g128_r32_n3_oneshot")
    slots = slots_of(make_golden_cache())
    for head in range(4):
        pool = sorted(paper[f"pool_h{head}"].tolist())
        retired = sorted(paper[f"aux_h{head}"].tolist())
        assert positions(slots, head, POOL) == pool
        assert positions(slots, head, RETIRED) == retired


@pytest.mark.parametrize("name", ["k", "v"])
def test_codes_and_scales_are_those_of_the_paper_s_algorithm(name: str) -> None:
    paper = golden("ott_g128_r32_n3_oneshot")
    cache = make_golden_cache()
    (run,) = cache.runs()
    blocks = DenseBlocks(run.blocks)
    page = cache.codec.page_layout(128)
    fmt = cache.codec.format_of(page, None, 128)
    valid = blocks.bits(fmt.valid or 0, 128).transpose(0, 1).flatten(1)

    side = fmt.k if name == "k" else fmt.v
    codes = blocks.codes(side, torch.float32)
    if name == "v":
        codes = codes.transpose(2, 3)
    codes = codes.transpose(0, 1).flatten(1, 2)
    off = (codes - paper[f"{name}_code"]).abs()[valid]
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.002

    scales, _ = blocks.scales(side, torch.float32)
    expected = paper[f"{name}_scale"].float()
    scales = scales.transpose(0, 1).reshape(expected.shape)
    assert torch.allclose(scales, expected, rtol=2e-3)


def test_outliers_are_exact_and_their_codes_are_never_attended() -> None:
    k, v = realistic(2, 600, 64, dtype=torch.float16)
    k[0, [7, 200, 201]] *= 0.01
    cache = compress(get_codec(SPEC), k, v)
    slots = slots_of(cache)
    assert positions(slots, 0, POOL) == [7, 200, 201]

    new_k, new_v = cache.reconstruct()
    for head in range(2):
        for position in positions(slots, head, POOL):
            token = (head, position)
            assert torch.equal(new_k[token], k[token].float())
            assert torch.equal(new_v[token], v[token].float())

    q = gaussian(6, 64, seed=5)
    expected = exact_attention(q, new_k, new_v, 0.125)
    assert relative_error(cache.attend(q), expected) <= cache.codec.attend_error


def test_the_first_layers_have_no_outliers() -> None:
    k, v = realistic(2, 600, 64)
    codec = get_codec("ott:skip_layers=2")
    skipped = compress(codec, k, v, layer=1)

    served = compress(codec, k, v, layer=2)

    assert not slots_of(skipped).states.any()
    assert slots_of(served).states.any()


@pytest.mark.parametrize("rank", [0, 4])
def test_low_rank_composes_with_outlier_tokens(rank: int) -> None:
    k, v = realistic(2, 2176, 64, dtype=torch.float16)
    plain = compress(get_codec(SPEC), k, v).reconstruct()
    ranked = compress(get_codec(f"{SPEC},rank={rank}"), k, v).reconstruct()

    for exact, without, with_rank in zip((k, v), plain, ranked, strict=True):
        ratio = relative_error(with_rank, exact) / relative_error(without, exact)
        if rank:
            assert ratio < 0.99
        else:
            assert ratio == 1.0
