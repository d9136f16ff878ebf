"""Outlier token tracing: who is kept, who stands in, and what attention sees of both."""

import pytest
import torch

from disagg.codecs import get_codec
from disagg.codecs.exact import exact_format, slots_format
from disagg.kernels.formats import POOL, RETIRED
from disagg.kernels.reference.kept import KeptSlots, view_kept
from disagg.kernels.reference.pages import DenseBlocks
from disagg.paged.compressed_kv import CompressedKV, compress
from tests.codecs.test_golden import golden
from tests.synthetic import exact_attention, realistic, relative_error

SPEC = "ott:bits=2,group=128,residual=32,outliers=3,aux=32,skip_layers=0"


def kept_of(cache: CompressedKV) -> KeptSlots:
    (run,) = cache.runs()
    side, raw = slots_format(cache.group.side), exact_format(cache.group.raw)
    return view_kept(run.side, run.kept_pages, side, raw)


def positions(kept: KeptSlots, head: int, state: int) -> list[int]:
    return sorted(kept.positions[head][kept.states[head] == state].tolist())


def test_pools_and_codes_are_those_of_the_paper_s_algorithm() -> None:
    """Prefill of 500 tokens at once, then 200 one by one."""
    found = golden("ott_g128_r32_n3_oneshot")
    k, v = found["k"][0], found["v"][0]
    codec = get_codec(SPEC)
    cache = compress(codec, k[:, :500], v[:, :500])
    cache.append(k[:, 500:], v[:, 500:])
    kept = kept_of(cache)
    for head in range(4):
        assert positions(kept, head, POOL) == sorted(found[f"pool_h{head}"].tolist())
        assert positions(kept, head, RETIRED) == sorted(found[f"aux_h{head}"].tolist())
    (run,) = cache.runs()
    blocks = DenseBlocks(run.blocks)
    fmt = codec.format_of(codec.page_layout(128), None, 128)
    there = blocks.bits(fmt.valid or 0, 128).transpose(0, 1).flatten(1)
    for side, name in ((fmt.k, "k"), (fmt.v, "v")):
        codes = blocks.codes(side, torch.float32)
        codes = (
            (codes if name == "k" else codes.transpose(2, 3))
            .transpose(0, 1)
            .flatten(1, 2)
        )
        off = (codes - found[f"{name}_code"]).abs()[there]
        assert off.max() <= 1
        assert (off > 0).float().mean() < 0.002
        scales = blocks.scales(side, torch.float32)[0].transpose(0, 1)
        wanted = found[f"{name}_scale"].float()
        assert torch.allclose(scales.reshape(wanted.shape), wanted, rtol=2e-3)


def test_kept_tokens_are_exact_and_their_places_are_never_attended() -> None:
    k, v = (x.half() for x in realistic(2, 600, 64))
    k[0, [7, 200, 201]] *= 0.01
    cache = compress(get_codec(SPEC), k, v)
    kept = kept_of(cache)
    assert positions(kept, 0, POOL) == [7, 200, 201]
    seen_k, seen_v = cache.reconstruct()
    for head in range(2):
        for position in positions(kept, head, POOL):
            assert torch.equal(seen_k[head, position], k[head, position].float())
            assert torch.equal(seen_v[head, position], v[head, position].float())
    q = torch.randn(6, 64, generator=torch.Generator().manual_seed(5))
    wanted = exact_attention(q, seen_k, seen_v, 0.125)
    assert relative_error(cache.attend(q), wanted) <= cache.codec.attend_error


def test_the_first_layers_keep_nobody() -> None:
    k, v = realistic(2, 600, 64)
    codec = get_codec("ott:skip_layers=2")
    assert not kept_of(compress(codec, k, v, layer=1)).states.any()
    assert kept_of(compress(codec, k, v, layer=2)).states.any()


@pytest.mark.parametrize("rank", [0, 4])
def test_low_rank_composes_with_outlier_tokens(rank: int) -> None:
    k, v = (x.half() for x in realistic(2, 2176, 64))
    plain = compress(get_codec(SPEC), k, v).reconstruct()
    both = compress(get_codec(f"{SPEC},rank={rank}"), k, v).reconstruct()
    for exact, without, with_rank in zip((k, v), plain, both, strict=True):
        ratio = relative_error(with_rank, exact) / relative_error(without, exact)
        assert ratio < 0.99 if rank else ratio == 1.0
