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
CUT = 37  # tokens


def make(total, count, head_dim):
    """Queries of the last tokens, K and V, as a fused projection leaves them."""
    generator = torch.Generator()
    generator.manual_seed(0)
    rows = torch.randn(total, 10, head_dim, generator=generator)
    heads = rows.bfloat16().transpose(0, 1)
    q, k, v = heads.split([6, 2, 2])
    return q[:, total - count :], k, v


def attend(q, k, v):
    return attend_exact(q, k, v, SCALE)


def expected_of(q, k, v):
    """The same in fp64."""
    return attend_in_fp64(q.double(), k.double(), v.double())


def attend_in_fp64(q, k, v):
    k = k.repeat_interleave(WIDTH, 0)
    v = v.repeat_interleave(WIDTH, 0)
    products = q @ k.transpose(1, 2)
    scores = products * SCALE
    key = torch.arange(k.shape[1])
    query = key[-q.shape[1] :, None]
    scores.masked_fill_(key > query, -torch.inf)
    return scores.softmax(2) @ v


@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize("total", [1, 16, 161, 257, 300])
@pytest.mark.parametrize("count", [1, 16, 45, 129])
def test_attention_is_that_of_fp64(total, count, head_dim):
    count = min(total, count)
    q, k, v = make(total, count, head_dim)
    expected = expected_of(q, k, v)

    attended = attend(q, k, v)

    error = (attended - expected).abs().max()
    assert error < 6e-3 * expected.abs().max()


def test_a_token_does_not_depend_on_how_a_prompt_is_cut():
    q, k, v = make(320, 320, 64)
    whole = attend(q, k, v)

    parts = []
    for start in range(0, 320, CUT):
        end = min(320, start + CUT)
        own = slice(start, end)
        visible = slice(end)
        part = attend(q[:, own], k[:, visible], v[:, visible])
        parts.append(part)

    assert torch.equal(torch.cat(parts, 1), whole)


def before_nan(x):
    """The same tokens, with others behind them in memory."""
    longer = x.new_full((2, 80, 64), torch.nan)
    tokens = longer[:, :50]
    return tokens.copy_(x)


def test_numbers_behind_the_last_token_are_not_read():
    q, k, v = make(50, 50, 64)
    expected = attend(q, k, v)

    attended = attend(q, before_nan(k), before_nan(v))

    assert torch.equal(attended, expected)


def test_products_of_torch_are_right_between_two_calls():
    q, k, v = make(64, 64, 64)
    x = torch.randn(64, 64).bfloat16()
    expected = x @ x

    attend(q, k, v)

    assert torch.equal(x @ x, expected)


def test_other_dtypes_are_left_to_torch():
    q, k, v = make(64, 64, 64)

    assert is_served(q, k, v)

    floats = [x.float() for x in (q, k, v)]
    assert not is_served(*floats)


def test_shapes_that_do_not_match_are_not_served():
    q, k, v = make(64, 64, 64)

    assert not is_served(q, k[:, :63], v[:, :63])
    assert not is_served(q[..., :32], k, v)
    assert not is_served(q[:5], k, v)
    assert not is_served(q, k, v[..., :32])
