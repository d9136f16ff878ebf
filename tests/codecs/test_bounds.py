"""The error that each codec's docstring promises, number by number."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from disagg.codecs import get_codec
from disagg.kernels.formats import PageFormat, Sparse
from disagg.kernels.ops import decode, encode
from disagg.kernels.reference.quantize import choose_outliers, column_means
from disagg.paged.compressed_kv import compress
from tests.codecs import test_golden as golden
from tests.synthetic import gaussian, realistic

# exact [H, n, D] -> the largest error allowed, same shape
Bound = Callable[[Tensor], Tensor]
TOKENS, CHANNELS = 1, 2


def grouped(x: Tensor, axis: int, size: int, reduce: str) -> Tensor:
    """max or min of groups of `size` (0: all) along an axis, for every number."""
    groups = x.unflatten(axis, (-1, size or x.shape[axis]))
    reduced = getattr(groups, reduce)(axis + 1, keepdim=True)
    return reduced.expand_as(groups).flatten(axis, axis + 1)


def asymmetric(bits: int, axis: int, size: int) -> Bound:
    def bound(x: Tensor) -> Tensor:
        high = grouped(x, axis, size, "amax")
        low = grouped(x, axis, size, "amin")
        largest = grouped(x.abs(), axis, size, "amax")
        step = torch.maximum((high - low) / (2**bits - 1), largest / 1024)
        step = step.clamp_min(2**-24) * (1 + 2**-11) + 2**-25
        rounding = 2**-11 * (x.abs() + step * 2**bits)
        return step / 2 + rounding + 2 ** (bits - 25)

    return bound


def by_segment(bits: int) -> Bound:
    """Per channel over each stretch of 2,048 tokens."""

    bound_of_segment = asymmetric(bits, TOKENS, 0)

    def bound(x: Tensor) -> Tensor:
        segments = x.split(2048, TOKENS)
        return torch.cat([bound_of_segment(segment) for segment in segments], 1)

    return bound


def int8(x: Tensor) -> Tensor:
    largest = x.abs().amax(CHANNELS, keepdim=True)
    return (largest / 254 + 2**-11 * largest + 2**-17).expand_as(x)


def fp8(x: Tensor) -> Tensor:
    largest = x.abs().amax(CHANNELS, keepdim=True)
    scale = grouped(largest, TOKENS, 64, "amax") / 448
    return 2**-4 * x.abs() + 2**-10 * scale


BOUNDS: dict[str, tuple[Bound, Bound]] = {
    "kivi:bits=2,group=32,residual=0": (
        asymmetric(2, TOKENS, 32),
        asymmetric(2, CHANNELS, 32),
    ),
    "kivi:bits=4,group=64,residual=0": (
        asymmetric(4, TOKENS, 64),
        asymmetric(4, CHANNELS, 64),
    ),
    "pertoken:bits=2,group=32": (
        asymmetric(2, CHANNELS, 32),
        asymmetric(2, CHANNELS, 32),
    ),
    "pertoken:bits=4,group=64": (
        asymmetric(4, CHANNELS, 64),
        asymmetric(4, CHANNELS, 64),
    ),
    "pertoken:bits=8,group=64": (
        asymmetric(8, CHANNELS, 64),
        asymmetric(8, CHANNELS, 64),
    ),
    "kcvt:bits=4": (by_segment(4), asymmetric(4, CHANNELS, 0)),
    "kcvt:bits=8": (by_segment(8), asymmetric(8, CHANNELS, 0)),
    "ott:group=128,residual=0,skip_layers=0": (
        asymmetric(2, TOKENS, 128),
        asymmetric(2, CHANNELS, 0),
    ),
    "alignedkv": (torch.zeros_like, torch.zeros_like),
    "int8": (int8, int8),
    "fp8": (fp8, fp8),
}


@pytest.mark.parametrize("spec", BOUNDS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [1.0, 3000.0, 1e-4])
def test_no_number_is_further_off_than_the_docstring_says(spec, head_dim, factor):
    k, v = ((x * factor).half() for x in realistic(2, 2560, head_dim))
    new_k, new_v = compress(get_codec(spec), k, v).reconstruct()

    bound_of_k, bound_of_v = BOUNDS[spec]
    k, v = k.float(), v.float()
    assert ((new_k - k).abs() <= bound_of_k(k)).all()
    assert ((new_v - v).abs() <= bound_of_v(v)).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("backbone", ["kcvt", "kivi"])
@pytest.mark.parametrize("method", ["gear-l", "gear"])
@pytest.mark.parametrize("factor", [1.0, 3000.0])
def test_low_rank_never_adds_to_the_error_of_a_segment(method, backbone, bits, factor):
    codec = get_codec(f"{method}:bits={bits},backbone={backbone}")
    kv = [(x * factor).half() for x in realistic(2, 2048, 64)]
    fmt = codec.format_of(codec.page_layout(64), codec.segment_layout(64), 64)
    backbone_fmt = replace(
        fmt,
        k=replace(fmt.k, low_rank=None),
        v=replace(fmt.v, low_rank=None),
    )
    blocks, segment = encode(*kv, fmt)
    segments = segment.expand(32, -1, -1)

    def errors(fmt: PageFormat) -> list[Tensor]:
        """Of K and of V in the Frobenius norm, by head."""
        decoded = decode(blocks, segments, fmt)
        rebuilt = [x.transpose(0, 1).flatten(1, 2) for x in decoded]
        pairs = zip(rebuilt, kv, strict=True)
        return [(x - exact.float()).norm(dim=(1, 2)) for x, exact in pairs]

    for whole, missing in zip(errors(fmt), errors(backbone_fmt), strict=True):
        assert (whole <= (1 + 2**-9) * missing).all()


@pytest.mark.parametrize(
    "spec",
    [
        "kivi:bits=2,group=32,residual=0",
        "kivi:bits=4,residual=0",
        "kcvt:bits=4",
        "gear:bits=4",
        "gear-l:bits=4",
    ],
)
def test_a_constant_channel_of_k_stays_exact(spec):
    k, v = realistic(2, 256, 64)
    k[0, :, 3] = 7.0
    k[1, :, 4] = 0.0

    new_k, _ = compress(spec, k.half(), v.half()).reconstruct()
    assert torch.equal(new_k[0, :, 3], k[0, :, 3])
    assert torch.equal(new_k[1, :, 4], k[1, :, 4])


@pytest.mark.parametrize(
    "spec",
    [
        "kivi:bits=2,residual=0",
        "pertoken:bits=2",
        "pertoken:bits=8,group=32",
        "kcvt",
        "gear",
    ],
)
def test_a_constant_token_of_v_stays_exact(spec):
    k, v = realistic(2, 256, 64)
    v[0, 3] = 7.0
    v[1, 4] = 0.0

    _, new_v = compress(spec, k.half(), v.half()).reconstruct()
    assert torch.equal(new_v[0, 3], v[0, 3])
    assert torch.equal(new_v[1, 4], v[1, 4])


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("factor", [1.0, 3000.0])
def test_a_rotation_spreads_errors_only_within_its_columns(bits, block, factor):
    codec = get_codec(f"decoquant:bits={bits},block={block}")
    k, v = ((y * factor).half() for y in realistic(2, 1024, 128))
    encoded = golden.encode(codec, k, v)
    group = codec.layer_group((0,), 2, 128, "float16")
    new_k, new_v = codec.decode(encoded, group)
    for exact, rebuilt, name in ((k, new_k, "k"), (v, new_v, "v")):
        exact = exact.float()
        plane = group.segment.plane(f"{name}_rotation")
        end = plane.offset + 2 * block * block
        words = encoded.segments[0, :, plane.offset : end].contiguous()
        matrix = words.view(torch.float16).view(2, block, block).float()
        inverse = matrix.double().inverse()[:, None].float()
        rotated = exact.unflatten(2, (-1, block)) @ inverse
        largest = rotated.flatten(2).abs().amax(2, keepdim=True)
        step = largest / (2 ** (bits - 1) - 1)
        allowed = step / 2 + 2**-11 * largest + 2**-17
        spread = matrix.abs().sum(1).repeat(1, 128 // block)
        bound = 1.001 * allowed * spread.unsqueeze(1)
        assert ((rebuilt - exact).abs() <= bound).all()


def test_outliers_are_those_of_all_the_tokens_that_share_a_scale():
    """A page far off the mean of its segment keeps what is farthest from that, not from its own."""
    x = gaussian(4, 1, 64, 3, seed=0)
    x[2] += 100
    x[2, 0, 7] = 90.0
    x[2, 0, 9] = 107.0

    def outliers(is_shared: bool) -> Tensor:
        means = column_means(x, is_shared)
        return choose_outliers(x, means, Sparse(1, 0, 0))[2]

    assert (outliers(is_shared=False) == 7).all()
    assert (outliers(is_shared=True) == 9).all()
