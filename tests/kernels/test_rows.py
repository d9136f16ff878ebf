"""Norms, rotations and gates: every path of the C library beside torch, which is the spec."""

import pytest
import torch

from disagg.kernels import rows
from disagg.kernels.cpu import library

ROWS = 37  # units of the library have 16
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=library.PATHS)
def path(request):
    if request.param not in library.paths():
        pytest.skip(f"this machine cannot run {request.param}")
    return request.param


@pytest.fixture(params=TOLERANCE, ids=str)
def make(request):
    """Makes random numbers of one dtype."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(request.param)


def by_torch(compute, *arguments):
    """The same in fp64."""
    exact = [*map(in_fp64, arguments)]
    with library.forced(library.TORCH):
        return compute(*exact)


def in_fp64(x):
    return x.double() if isinstance(x, torch.Tensor) else x


def assert_near(actual, expected):
    largest = expected.abs().max()
    error = (actual.double() - expected).abs().max()
    assert error < TOLERANCE[actual.dtype] * largest


def rotate(x, cosines, sines):
    return rows.rotate(x, (cosines, sines))


def test_sum_and_norm_are_those_of_torch(path, make):
    x = make(ROWS, 96)
    more = make(ROWS, 100)[:, :96]
    weight = make(96)
    expected = by_torch(rows.add_and_norm, x, more, weight, 1e-5, 0.5)

    with library.forced(path):
        total, normalized = rows.add_and_norm(x, more, weight, 1e-5, 0.5)

    assert_near(total, expected[0])
    assert_near(normalized, expected[1])


def test_a_norm_needs_no_sum(path, make):
    x = make(ROWS, 96)
    weight = make(96)
    _, expected = by_torch(rows.add_and_norm, x, None, weight, 1e-5)

    with library.forced(path):
        total, normalized = rows.add_and_norm(x, None, weight, 1e-5)

    assert total is x
    assert_near(normalized, expected)


def test_only_the_heads_that_are_named_are_rotated(path, make):
    heads = make(ROWS, 5, 64)
    cosines = make(ROWS, 64)
    sines = make(ROWS, 64)
    before = heads.clone()
    named = heads[:, :3]
    expected = by_torch(rotate, named, cosines, sines)

    with library.forced(path):
        rotated = rows.rotate(named, (cosines, sines))

    assert_near(rotated, expected)
    assert torch.equal(heads[:, 3:], before[:, 3:])


def dense(x):
    return x


def spread(x):
    """The same numbers, with gaps between rows."""
    return torch.cat([x, x], 1)[:, : x.shape[1]]


def one_row(x):
    """The first row, for all rows."""
    return x[:1]


@pytest.mark.parametrize("shape", [dense, spread, one_row])
def test_a_rotation_may_lie_in_any_way(path, make, shape):
    heads = make(ROWS, 3, 64)
    cosines = shape(make(ROWS, 64))
    sines = shape(make(ROWS, 64))
    expected = by_torch(rotate, heads, cosines, sines)

    with library.forced(path):
        rotated = rows.rotate(heads, (cosines, sines))

    assert_near(rotated, expected)


def test_one_row_is_added_to_all(path, make):
    x = make(ROWS, 96)
    more = one_row(make(ROWS, 96))
    weight = make(96)
    expected = by_torch(rows.add_and_norm, x, more, weight, 1e-5)

    with library.forced(path):
        total, normalized = rows.add_and_norm(x, more, weight, 1e-5)

    assert_near(total, expected[0])
    assert_near(normalized, expected[1])


def test_gates_are_those_of_torch_for_large_numbers_too(path, make):
    x = 30 * make(ROWS, 2 * 80)
    expected = by_torch(rows.gate, x)

    with library.forced(path):
        gated = rows.gate(x)

    assert_near(gated, expected)


@pytest.mark.parametrize("columns", [24, 96])
def test_a_row_does_not_depend_on_its_neighbours(path, make, columns):
    x = make(ROWS, columns)
    weight = make(columns)

    with library.forced(path):
        _, together = rows.add_and_norm(x, None, weight, 1e-5)
        _, alone = rows.add_and_norm(x[20:21], None, weight, 1e-5)

    assert torch.equal(together[20:21], alone)
