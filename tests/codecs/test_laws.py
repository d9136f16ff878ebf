"""Every codec under every law: one table of codecs, one of laws."""

import pytest
import torch

from disagg.bench.synthetic import exact_attention, realistic, relative_error
from disagg.codecs import codec_names, get_codec
from disagg.codecs.base import Codec
from disagg.codecs.cache import CompressedKV
from disagg.page import FinalAt

CODECS = [
    "raw",
    "raw:dtype=bf16",
    "kivi:bits=2,group=64,residual=64",
    "kivi:bits=2,group=32,residual=128",
    "kivi:bits=4,group=64,residual=64",
    "kivi:bits=4,group=32,residual=0",
]
LENGTHS = [1, 63, 64, 500, 1300]


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


def stored(cache: CompressedKV) -> bytes:
    """Every byte of the cache: pages, segments and tail."""
    encoded = cache.encoded()
    parts = [encoded.blocks.numpy().tobytes()]
    if encoded.segments is not None:
        parts.append(encoded.segments.numpy().tobytes())
    k, v = cache.reconstruct()
    return b"".join([*parts, k.numpy().tobytes(), v.numpy().tobytes()])


def test_the_table_has_every_codec() -> None:
    assert {spec.partition(":")[0] for spec in CODECS} == set(codec_names())


def test_a_spec_rebuilds_its_codec(codec: Codec) -> None:
    assert get_codec(codec.spec) == codec


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("per_head", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("n", LENGTHS)
def test_attention_on_the_bytes_equals_attention_on_the_reconstruction(
    codec: Codec, n: int, per_head: int, head_dim: int
) -> None:
    k, v = realistic(2, n, head_dim)
    q = torch.randn(2 * per_head, head_dim, generator=torch.Generator().manual_seed(1))
    cache = codec.compress(k, v)
    wanted = exact_attention(q, *cache.reconstruct(), scale=head_dim**-0.5)
    assert relative_error(cache.attend(q), wanted) <= 1e-5


def test_token_by_token_append_ends_in_the_same_bytes_as_one_compress(codec: Codec) -> None:
    if codec.final_at is not FinalAt.PAGE:
        pytest.skip("pages of this codec depend on more than their own tokens")
    k, v = realistic(2, 333, 64)
    whole = codec.compress(k, v)
    grown = codec.compress(k[:, :0], v[:, :0])
    for t in range(150):
        grown.append(k[:, t : t + 1], v[:, t : t + 1])
    grown.append(k[:, 150:], v[:, 150:])
    assert stored(grown) == stored(whole)
    assert grown.nbytes == whole.nbytes


def test_encoding_is_deterministic(codec: Codec) -> None:
    k, v = realistic(3, 400, 128)
    assert stored(codec.compress(k, v)) == stored(codec.compress(k.clone(), v.clone()))


def test_a_block_is_exactly_as_long_as_its_layout_says(codec: Codec) -> None:
    k, v = realistic(3, 700, 128)
    cache = codec.compress(k, v)
    assert cache.encoded().blocks.shape[2] == cache.group.page.block_bytes
    assert cache.encoded().blocks.shape[:2] == (cache.group.sealed(700) // codec.page_tokens, 3)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 130, 300])
def test_the_reconstruction_has_every_token_in_order(codec: Codec, n: int) -> None:
    k, v = realistic(2, n, 64)
    for exact, seen in zip((k, v), codec.compress(k, v).reconstruct(), strict=True):
        assert seen.shape == exact.shape
        assert torch.isfinite(seen).all()
        if n:
            nearest = torch.cdist(exact[0], seen[0]).argmin(0)
            assert (nearest == torch.arange(n)).float().mean() > 0.8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_dtype_is_accepted(codec: Codec, dtype: torch.dtype) -> None:
    k, v = (x.to(dtype) for x in realistic(2, 200, 64))
    cache = codec.compress(k, v)
    assert relative_error(cache.reconstruct()[0], k.float()) < 0.3


def test_hostile_values_stay_finite(codec: Codec) -> None:
    k, v = realistic(2, 256, 64)
    k[0, :, 3] = 7.0  # a constant channel
    k[0, :, 4] = 0.0
    k[1, :, 5] += 60 * k[1, :, 5].std()  # a bias-like channel
    v[0, 9] = 0.0
    v[1, 10:20] = 65504.0
    k[1, 30:40, 6] = -65504.0
    cache = codec.compress(k, v)
    seen_k, _ = cache.reconstruct()
    assert torch.isfinite(cache.attend(torch.randn(4, 64))).all()
    assert torch.equal(seen_k[0, :, 3], k[0, :, 3])
    assert torch.equal(seen_k[0, :, 4], k[0, :, 4])
