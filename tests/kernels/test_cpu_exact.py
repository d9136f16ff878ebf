"""Exact attention on the matrix units of a CPU, beside fp64."""

import pytest
import torch

from disagg.kernels.cpu import library
from disagg.kernels.cpu.exact import attend_exact, is_served

pytestmark = pytest.mark.skipif(
    not library.has_amx(), reason="this machine has no matrix units"
)
SCALE = 0.2
WIDTH = 3  # query heads of a KV head


def make(total, count, head_dim):
    """Queries of the last tokens, K and V, as a fused projection leaves them."""
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(total, 10, head_dim, generator=generator).bfloat16()
    q, k, v = heads.transpose(0, 1).split([6, 2, 2])
    return q[:, total - count :], k, v


def expected_of(q, k, v):
    count, total = q.shape[1], k.shape[1]
    k, v = (x.double().repeat_interleave(WIDTH, 0) for x in (k, v))
    scores = q.double() @ k.transpose(1, 2) * SCALE
    query = torch.arange(total - count, total)[:, None]
    scores.masked_fill_(torch.arange(total) > query, -torch.inf)
    return scores.softmax(2) @ v


@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize(
    ("total", "count"), [(16, 16), (161, 161), (300, 45), (257, 129)]
)
def test_attention_is_that_of_fp64(total, count, head_dim):
    q, k, v = make(total, count, head_dim)
    expected = expected_of(q, k, v)

    attended = attend_exact(q, k, v, SCALE)

    error = (attended - expected).abs().max()
    assert error < 6e-3 * expected.abs().max()


def test_a_token_does_not_depend_on_how_a_prompt_is_cut():
    q, k, v = make(320, 320, 64)
    whole = attend_exact(q, k, v, SCALE)

    parts = [
        attend_exact(q[:, start : start + 64], k[:, :end], v[:, :end], SCALE)
        for start, end in zip(range(0, 320, 64), range(64, 321, 64), strict=True)
    ]

    assert torch.equal(torch.cat(parts, 1), whole)


def test_numbers_behind_the_last_token_are_not_read():
    q, k, v = make(50, 50, 64)
    padded_k, padded_v = (x.new_full((2, 80, 64), torch.nan) for x in (k, v))
    padded_k[:, :50], padded_v[:, :50] = k, v

    attended = attend_exact(q, padded_k[:, :50], padded_v[:, :50], SCALE)

    assert torch.equal(attended, attend_exact(q, k, v, SCALE))


def test_products_of_torch_are_right_between_two_calls():
    q, k, v = make(64, 64, 64)
    x = torch.randn(64, 64).bfloat16()
    expected = x @ x

    attend_exact(q, k, v, SCALE)

    assert torch.equal(x @ x, expected)


def test_other_dtypes_and_single_queries_are_left_to_torch():
    q, k, v = make(64, 64, 64)

    assert is_served(q, k, v)
    assert not is_served(q[:, :1], k, v)
    assert not is_served(q.float(), k.float(), v.float())
