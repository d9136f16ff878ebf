"""Pages of latents: V is the first channels of K and is not stored."""

from dataclasses import replace

import pytest
import torch

from disagg.codecs import codec_names, get_codec
from disagg.codecs.contract import LATENT_CODECS
from disagg.codecs.describe import bits_per_element, fp16_percent
from disagg.codecs.planning import KVShape, parse_plan
from disagg.errors import ConfigError, RequestError
from disagg.kernels.cpu import library
from disagg.kernels.view import Softmax
from disagg.kv.plan import LayerShape
from disagg.paged.compressed_kv import compress
from tests.synthetic import exact_attention, realistic, relative_error

LATENT, ROTATED = 96, 32
DIM = LATENT + ROTATED
SCALE = 0.1
SPECS = {
    "raw": "raw:dtype=fp16",
    "fp8": "fp8",
    "int8": "int8",
    "int8-sink": "int8:sink=64",
    "kcvt": "kcvt",
    "kivi-2": "kivi:bits=2,group=32,residual=64",
    "kivi-4": "kivi:bits=4,residual=0",
    "pertoken-2": "pertoken:bits=2,group=32",
    "pertoken-8": "pertoken:bits=8,group=16",
}
REFUSE = sorted(set(codec_names()) - set(LATENT_CODECS))
of_every_codec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def keys(n, heads=1):
    k, _ = realistic(heads, n, DIM)
    return k.half()


def compressed(spec, k, prompt):
    """A prompt of latents, and the rest of them appended."""
    v = k[..., :LATENT]
    cache = compress(spec, k[:, :prompt], v[:, :prompt], latent=LATENT)
    cache.append(k[:, prompt:], v[:, prompt:])
    return cache


@of_every_codec
def test_k_of_latents_is_k_of_ordinary_pages_and_v_a_part_of_it(spec):
    k = keys(330)
    ordinary = compress(spec, k[:, :200], k[:, :200])
    ordinary.append(k[:, 200:], k[:, 200:])
    expected, _ = ordinary.reconstruct()

    new_k, new_v = compressed(spec, k, prompt=200).reconstruct()

    assert torch.equal(new_k, expected)
    assert torch.equal(new_v, new_k[..., :LATENT])


@of_every_codec
def test_the_reference_attends_exactly_to_what_is_decoded(spec):
    cache = compressed(spec, keys(330, heads=2), prompt=200)
    q = torch.randn(6, DIM, dtype=torch.float64)
    new_k, new_v = cache.reconstruct(torch.float64)
    expected = exact_attention(q, new_k, new_v, SCALE)

    o = cache.attend(q, Softmax(SCALE))
    with library.forced(library.TORCH):
        o_single = cache.attend(q.float(), Softmax(SCALE))

    assert o.shape == (6, LATENT)
    assert relative_error(o, expected) <= 1e-12
    assert relative_error(o_single, expected) <= 1e-5


@of_every_codec
@pytest.mark.parametrize("path", library.PATHS)
def test_the_library_writes_and_attends_as_the_reference(spec, path):
    if path not in library.paths():
        pytest.skip(f"this machine cannot run {path}")
    k = keys(330, heads=2)
    q = torch.randn(6, 3, DIM)
    with library.forced(library.TORCH):
        reference = compressed(spec, k, prompt=200)
        expected = reference.attend(q.double(), Softmax(SCALE))

    with library.forced(path):
        cache = compressed(spec, k, prompt=200)
        o = cache.attend(q, Softmax(SCALE))

    for run, expected_run in zip(cache.runs(), reference.runs(), strict=True):
        assert torch.equal(run.blocks, expected_run.blocks)
    bound = get_codec(spec).attend_errors[path]
    assert relative_error(o, expected) <= bound


@of_every_codec
def test_latents_take_half_the_bytes_and_are_pages_of_their_own(spec):
    codec = get_codec(spec)
    ordinary = codec.layer_group((0,), 1, DIM, "float16")

    group = codec.layer_group((0,), 1, DIM, "float16", latent=LATENT)

    other = codec.layer_group((0,), 1, DIM, "float16", latent=LATENT - 16)
    prints = {x.fingerprint for x in (ordinary, group, other)}
    assert len(prints) == 3
    assert group.latent == LATENT
    assert group.raw.block_bytes * 2 == ordinary.raw.block_bytes
    assert group.page.block_bytes <= 0.55 * ordinary.page.block_bytes
    assert group.numbers(100) * 2 == ordinary.numbers(100)
    assert bits_per_element(group) == pytest.approx(bits_per_element(ordinary), 0.1)
    assert fp16_percent(group, 999) == pytest.approx(fp16_percent(ordinary, 999), 0.1)


@pytest.mark.parametrize("name", REFUSE)
def test_codecs_that_cannot_hold_latents_name_those_that_can(name):
    codec = get_codec(name)

    with pytest.raises(ConfigError, match=f"^{name}.*{', '.join(LATENT_CODECS)}"):
        codec.layer_group((0,), 1, 64, "float16", latent=48)


def test_every_other_codec_holds_latents():
    assert {get_codec(spec).name for spec in SPECS.values()} == set(LATENT_CODECS)


@pytest.mark.parametrize("latent", [0, DIM, DIM + 16])
def test_a_latent_that_is_no_part_of_k_is_refused(latent):
    with pytest.raises(ConfigError, match=str(latent)):
        get_codec("raw").layer_group((0,), 1, DIM, "float16", latent=latent)


def test_v_of_other_channels_than_the_latent_is_refused():
    k = keys(20)

    with pytest.raises(RequestError, match=str(LATENT)):
        compress("raw", k, k, latent=LATENT)


def test_an_alternative_serves_the_layers_whose_latents_the_first_refuses():
    latents = LayerShape(heads=1, head_dim=576, latent=512)
    ordinary = LayerShape(heads=2, head_dim=64)
    shape = KVShape((latents, ordinary), "bfloat16")

    plan = parse_plan("banded:bits=3|kivi:bits=4", shape)

    names = [group.codec.partition(":")[0] for group in plan.groups]
    assert names == ["kivi", "banded"]
    assert [group.latent for group in plan.groups] == [512, None]
    other = replace(shape, layers=(replace(latents, latent=448), ordinary))
    assert parse_plan("raw", shape).fingerprint != parse_plan("raw", other).fingerprint
