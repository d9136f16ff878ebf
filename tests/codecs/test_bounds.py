"""The error that each codec's docstring promises, number by number."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from disagg.bench.synthetic import realistic
from disagg.codecs import get_codec

Bound = Callable[[Tensor], Tensor]  # exact [H, n, D] -> the largest error allowed, same shape
TOKENS, CHANNELS = 1, 2


def grouped(x: Tensor, axis: int, size: int, reduce: str) -> Tensor:
    """max or min of groups of `size` along an axis, for every number."""
    groups = x.unflatten(axis, (-1, size))
    return getattr(groups, reduce)(axis + 1, keepdim=True).expand_as(groups).flatten(axis, axis + 1)


def asymmetric(bits: int, axis: int, size: int) -> Bound:
    def bound(x: Tensor) -> Tensor:
        high, low = (grouped(x, axis, size, how) for how in ("amax", "amin"))
        largest = grouped(x.abs(), axis, size, "amax")
        step = torch.maximum((high - low) / (2**bits - 1), largest / 1024).clamp_min(2**-24)
        step = step * (1 + 2**-11) + 2**-25
        return step / 2 + 2**-11 * (x.abs() + step * 2**bits) + 2 ** (bits - 25)

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
    "pertoken:bits=2,group=32": (asymmetric(2, CHANNELS, 32), asymmetric(2, CHANNELS, 32)),
    "pertoken:bits=4,group=64": (asymmetric(4, CHANNELS, 64), asymmetric(4, CHANNELS, 64)),
    "pertoken:bits=8,group=64": (asymmetric(8, CHANNELS, 64), asymmetric(8, CHANNELS, 64)),
    "int8": (int8, int8),
    "fp8": (fp8, fp8),
}


@pytest.mark.parametrize("spec", BOUNDS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [1.0, 3000.0, 1e-4])
def test_no_number_is_further_off_than_the_docstring_says(
    spec: str, head_dim: int, factor: float
) -> None:
    n = 2560
    k, v = ((x * factor).half() for x in realistic(2, n, head_dim))
    for exact, seen, bound in zip(
        (k, v), get_codec(spec).compress(k, v).reconstruct(), BOUNDS[spec], strict=True
    ):
        assert ((seen - exact.float()).abs() <= bound(exact.float())).all()


@pytest.mark.parametrize("spec", ["kivi:bits=2,group=32,residual=0", "kivi:bits=4,residual=0"])
def test_a_constant_channel_of_k_stays_exact(spec: str) -> None:
    k, v = realistic(2, 256, 64)
    k[0, :, 3], k[1, :, 4] = 7.0, 0.0
    seen, _ = get_codec(spec).compress(k.half(), v.half()).reconstruct()
    assert torch.equal(seen[0, :, 3], k[0, :, 3])
    assert torch.equal(seen[1, :, 4], k[1, :, 4])


@pytest.mark.parametrize(
    "spec", ["kivi:bits=2,residual=0", "pertoken:bits=2", "pertoken:bits=8,group=32"]
)
def test_a_constant_token_of_v_stays_exact(spec: str) -> None:
    k, v = realistic(2, 256, 64)
    v[0, 3], v[1, 70] = 7.0, 0.0
    _, seen = get_codec(spec).compress(k.half(), v.half()).reconstruct()
    assert torch.equal(seen[0, 3], v[0, 3])
    assert torch.equal(seen[1, 70], v[1, 70])
