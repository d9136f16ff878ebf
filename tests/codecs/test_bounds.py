"""The error that each codec's docstring promises, number by number."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from disagg.codecs import get_codec
from disagg.kernels.formats import Sparse
from disagg.kernels.ops import decode, encode
from disagg.kernels.reference.quantize import choose_outliers, column_means
from disagg.paged.compressed_kv import compress
from tests.codecs import test_golden as golden
from tests.synthetic import realistic

Bound = Callable[
    [Tensor], Tensor
]  # exact [H, n, D] -> the largest error allowed, same shape
TOKENS, CHANNELS = 1, 2


def grouped(x: Tensor, axis: int, size: int, reduce: str) -> Tensor:
    """max or min of groups of `size` (0: all) along an axis, for every number."""
    groups = x.unflatten(axis, (-1, size or x.shape[axis]))
    return (
        getattr(groups, reduce)(axis + 1, keepdim=True)
        .expand_as(groups)
        .flatten(axis, axis + 1)
    )


def asymmetric(bits: int, axis: int, size: int) -> Bound:
    def bound(x: Tensor) -> Tensor:
        high, low = (grouped(x, axis, size, how) for how in ("amax", "amin"))
        largest = grouped(x.abs(), axis, size, "amax")
        step = torch.maximum((high - low) / (2**bits - 1), largest / 1024).clamp_min(
            2**-24
        )
        step = step * (1 + 2**-11) + 2**-25
        return step / 2 + 2**-11 * (x.abs() + step * 2**bits) + 2 ** (bits - 25)

    return bound


def by_segment(bits: int) -> Bound:
    """Per channel over each stretch of 2,048 tokens."""

    def bound(x: Tensor) -> Tensor:
        return torch.cat(
            [asymmetric(bits, TOKENS, 0)(part) for part in x.split(2048, TOKENS)], 1
        )

    return bound


def int8(x: Tensor) -> Tensor:
    largest = x.abs().amax(CHANNELS, keepdim=True)
    return (largest / 254 + 2**-11 * largest + 2**-17).expand_as(x)


def fp8(x: Tensor) -> Tensor:
    scale = grouped(x.abs().amax(CHANNELS, keepdim=True), TOKENS, 64, "amax") / 448
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
    n = 2560
    k, v = ((x * factor).half() for x in realistic(2, n, head_dim))
    for exact, seen, bound in zip(
        (k, v), compress(get_codec(spec), k, v).reconstruct(), BOUNDS[spec], strict=True
    ):
        assert ((seen - exact.float()).abs() <= bound(exact.float())).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("backbone", ["kcvt", "kivi"])
@pytest.mark.parametrize("method", ["gear-l", "gear"])
@pytest.mark.parametrize("factor", [1.0, 3000.0])
def test_low_rank_never_adds_to_the_error_of_a_segment(method, backbone, bits, factor):
    codec = get_codec(f"{method}:bits={bits},backbone={backbone}")
    x = [(y * factor).half() for y in realistic(2, 2048, 64)]
    segment = codec.segment_layout(64)
    fmt = codec.format_of(codec.page_layout(64), segment, 64)
    blocks, shared = encode(*x, fmt)
    without = replace(
        fmt, k=replace(fmt.k, low_rank=None), v=replace(fmt.v, low_rank=None)
    )
    both = (decode(blocks, shared.expand(32, -1, -1), x) for x in (fmt, without))
    whole, plain = ([y.transpose(0, 1).flatten(1, 2) for y in some] for some in both)
    for exact, seen, backbone_alone in zip(x, whole, plain, strict=True):
        missing = (backbone_alone - exact.float()).norm(dim=(1, 2))
        assert ((seen - exact.float()).norm(dim=(1, 2)) <= (1 + 2**-9) * missing).all()


CHANNELS_OF_K = (
    "kivi:bits=2,group=32,residual=0",
    "kivi:bits=4,residual=0",
    "kcvt:bits=4",
)
CHANNELS_OF_K += ("gear:bits=4", "gear-l:bits=4")
TOKENS_OF_V = ("kivi:bits=2,residual=0", "pertoken:bits=2", "pertoken:bits=8,group=32")
TOKENS_OF_V += ("kcvt", "gear")


@pytest.mark.parametrize(
    ("spec", "side", "axis"),
    [
        *((x, 0, CHANNELS) for x in CHANNELS_OF_K),
        *((x, 1, TOKENS) for x in TOKENS_OF_V),
    ],
)
def test_a_constant_channel_of_k_and_a_constant_token_of_v_stay_exact(spec, side, axis):
    kv = realistic(2, 256, 64)
    kv[side][0].select(axis - 1, 3).fill_(7.0)
    kv[side][1].select(axis - 1, 4).zero_()
    seen = compress(get_codec(spec), *(x.half() for x in kv)).reconstruct()[side]
    for head, index in ((0, 3), (1, 4)):
        found, exact = (x[head].select(axis - 1, index) for x in (seen, kv[side]))
        assert torch.equal(found, exact)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("factor", [1.0, 3000.0])
def test_a_rotation_spreads_the_error_no_further_than_its_columns(bits, block, factor):
    codec = get_codec(f"decoquant:bits={bits},block={block}")
    k, v = ((y * factor).half() for y in realistic(2, 1024, 128))
    encoded = golden.encode(codec, k, v)
    group = codec.layer_group((0,), 2, 128, "float16")
    for exact, seen, name in zip(
        (k, v), codec.decode(encoded, group), "kv", strict=True
    ):
        offset = group.segment.plane(f"{name}_rotation").offset
        stored = encoded.segments[
            0, :, offset : offset + 2 * block * block
        ].contiguous()
        matrix = stored.view(torch.float16).view(2, block, block).float()
        inverse = matrix.double().inverse()[:, None].float()
        turned = exact.float().unflatten(2, (-1, block)) @ inverse
        largest = turned.flatten(2).abs().amax(2, keepdim=True)
        step = largest / (2 ** (bits - 1) - 1)
        allowed = step / 2 + 2**-11 * largest + 2**-17
        spread = matrix.abs().sum(1).repeat(1, 128 // block).unsqueeze(1)
        assert ((seen - exact.float()).abs() <= 1.001 * allowed * spread).all()


def test_outliers_are_those_of_all_the_tokens_that_share_a_scale():
    """A page far off the mean of its segment keeps what is farthest from that, not from its own."""
    x = torch.randn(4, 1, 64, 3, generator=torch.Generator().manual_seed(0))
    x[2] += 100
    x[2, 0, 7], x[2, 0, 9] = 90.0, 107.0
    sparse = Sparse(1, 0, 0)
    alone, shared = (
        choose_outliers(x, column_means(x, one), sparse)[2] for one in (False, True)
    )
    assert (alone == 7).all()
    assert (shared == 9).all()
