"""The Triton competition keeps the tokens that the reference keeps, in the same slots."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from disagg.kernels import compete, ops_kept, reference_kept
from disagg.kernels.formats import RawFormat
from disagg.kernels.reference_kept import FREE, POOL, RETIRED, Kept, KeptFormat, view_kept
from tests.kernels.cases import raw_format

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, D = 3, 48


def empty(slots: int, raw: RawFormat) -> Kept:
    """A side record whose planes are views with odd strides, as they are in an arena."""
    states = 8 * slots + (-8 * slots) % 16
    fmt = KeptFormat(slots, states + -(-slots // 16) * 16 + 16, 0, 4 * slots, states)
    side = torch.zeros(HEADS, fmt.block_bytes, dtype=torch.uint8, device=DEVICE)
    pages = -(-slots // 16)
    blocks = torch.zeros(pages, HEADS, raw.block_bytes, dtype=torch.uint8, device=DEVICE)
    return view_kept(side, blocks, fmt, raw)


def copy_of(kept: Kept) -> Kept:
    return Kept(*(getattr(kept, field.name).cpu().clone() for field in fields(kept)))


def keys(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sums of these are exact; norms of some tokens are equal."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randint(-40, 40, (2, HEADS, n, D), generator=generator).half() / 8
    k[:, n // 2] = k[:, n // 3].flip(1)
    return k, v


def run_both(kept: Kept, expected: Kept, k: Tensor, v: Tensor, count: int, first: int) -> Tensor:
    won = compete.keep_outliers(kept, k.to(DEVICE), v.to(DEVICE), count, first).cpu()
    assert torch.equal(won, reference_kept.keep_outliers(expected, k, v, count, first))
    for field in fields(kept):
        name = field.name
        assert torch.equal(getattr(kept, name).cpu(), getattr(expected, name)), name
    return won


@pytest.mark.parametrize(("slots", "count"), [(7, 3), (20, 20), (5, 0)])
def test_the_same_tokens_win_and_lie_in_the_same_slots(slots, count):
    kept = empty(slots, raw_format("float16", D))
    expected = copy_of(kept)
    won = run_both(kept, expected, *keys(1500, 1), count, 0)
    assert (won.sum(1) == count).all()


def test_pages_compete_with_the_pool_until_slots_are_full():
    kept = empty(6, raw_format("float16", D))
    expected = copy_of(kept)
    for page in range(8):
        k, v = keys(65, page)
        k[0] *= 1 - page / 8  # ever better tokens: this head runs out of slots
        run_both(kept, expected, k, v, 2, 65 * page)
    assert not (expected.states[0] == FREE).any()
    assert (expected.states == RETIRED).any()
    assert ((expected.states == POOL).sum(1) == 2).all()


def test_fewer_tokens_than_places_all_win():
    kept = empty(9, raw_format("float16", D))
    won = run_both(kept, copy_of(kept), *keys(4, 5), 8, 16)
    assert won.all()


def test_of_equals_the_earlier_wins():
    kept = empty(4, raw_format("float16", D))
    x = torch.ones(HEADS, 70, D).half()
    won = run_both(kept, copy_of(kept), x, x, 3, 0)
    assert won[:, :3].all()


def test_views_are_read_where_they_lie():
    kept = empty(4, raw_format("float16", D))
    k, v = keys(70, 2)
    both = torch.cat([k, v], 2).transpose(0, 1).contiguous().transpose(0, 1)
    run_both(kept, copy_of(kept), both[..., :D], both[..., D:], 3, 0)
    with pytest.raises(ValueError, match="adjacent"):
        compete.keep_outliers(kept, k.transpose(1, 2), v.transpose(1, 2), 3, 0)


def test_keys_and_values_that_do_not_belong_together_are_refused():
    kept, x = empty(4, raw_format("float16", D)), torch.zeros(HEADS, 8, D).half()
    with pytest.raises(ValueError, match="k is"):
        ops_kept.keep_outliers(kept, x, x[:, :7], 2, 0)
    with pytest.raises(ValueError, match="k is"):
        ops_kept.keep_outliers(kept, x.int(), x.int(), 2, 0)
