"""Tokens compete for the slots of a head: who wins, where they lie, what happens without room."""

import pytest
import torch
from torch import Tensor

from disagg.kernels import ops
from disagg.kernels.formats import FREE, POOL, RETIRED, SlotsFormat
from disagg.kernels.reference.kept import KeptSlots, view_kept
from tests.kernels.cases import DEVICE, raw_format

HEADS, D = 3, 48


def empty(slots: int) -> KeptSlots:
    """A side record whose planes are views with odd strides, as they are in an arena."""
    states = 8 * slots + (-8 * slots) % 16
    fmt = SlotsFormat(slots, states + -(-slots // 16) * 16 + 16, 0, 4 * slots, states)
    side = torch.zeros(HEADS, fmt.block_bytes, dtype=torch.uint8, device=DEVICE)
    raw = raw_format("float16", D)
    blocks = torch.zeros(
        -(-slots // 16), HEADS, raw.block_bytes, dtype=torch.uint8, device=DEVICE
    )
    return view_kept(side, blocks, fmt, raw)


def keys(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sums of these are exact; norms of some tokens are equal."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randint(-40, 40, (2, HEADS, n, D), generator=generator).half() / 8
    k[:, n // 2] = k[:, n // 3].flip(1)
    return k, v


class Spec:
    """The same in plain Python: slots of a head are [position, score, state, k, v]."""

    def __init__(self, slots: int):
        self.slots = [[] for _ in range(HEADS)]
        self.room = slots

    def keep(self, k: Tensor, v: Tensor, count: int, first: int) -> list[list[bool]]:
        won = []
        for head, slots in enumerate(self.slots):
            scores = k[head].float().abs().sum(1).tolist()
            pool = [
                (slot[1], i, slot) for i, slot in enumerate(slots) if slot[2] == POOL
            ]
            new = [(score, self.room + i, None) for i, score in enumerate(scores)]
            best = sorted(pool + new, key=lambda x: x[:2])[:count]
            winners = sorted(i - self.room for _, i, slot in best if slot is None)
            won.append([i in winners for i in range(len(scores))])
            if len(slots) + len(winners) > self.room:
                won[-1] = [False] * len(scores)
                continue
            for _, _, slot in pool:
                if not any(slot is other for _, _, other in best):
                    slot[2] = RETIRED
            slots += [
                [first + i, scores[i], POOL, k[head, i], v[head, i]] for i in winners
            ]
        return won


def check(
    kept: KeptSlots, spec: Spec, k: Tensor, v: Tensor, count: int, first: int
) -> Tensor:
    won = ops.keep_outliers(kept, k.to(DEVICE), v.to(DEVICE), count, first).cpu()
    assert won.tolist() == spec.keep(k, v, count, first)
    for head, slots in enumerate(spec.slots):
        n = len(slots)
        assert kept.positions[head, :n].tolist() == [slot[0] for slot in slots]
        assert kept.scores[head, :n].tolist() == [slot[1] for slot in slots]
        assert kept.states[head].tolist() == [x[2] for x in slots] + [FREE] * (
            spec.room - n
        )
        for i, slot in enumerate(slots):
            assert torch.equal(kept.k[head, i].cpu(), slot[3])
            assert torch.equal(kept.v[head, i].cpu(), slot[4])
    return won


@pytest.mark.parametrize(("slots", "count"), [(7, 3), (20, 20), (5, 0)])
def test_the_tokens_of_smallest_keys_win_and_lie_in_order(slots, count):
    won = check(empty(slots), Spec(slots), *keys(700, 1), count, 0)
    assert (won.sum(1) == count).all()


def test_pages_compete_with_the_pool_until_slots_are_full():
    kept, spec = empty(6), Spec(6)
    for page in range(8):
        k, v = keys(65, page)
        k[0] *= 1 - page / 8  # ever better tokens: this head runs out of slots
        check(kept, spec, k, v, 2, 65 * page)
    assert not (kept.states[0] == FREE).any()
    assert (kept.states == RETIRED).any()
    assert ((kept.states == POOL).sum(1) == 2).all()


def test_fewer_tokens_than_slots_all_win_and_of_equals_the_earlier():
    assert check(empty(9), Spec(9), *keys(4, 5), 8, 16).all()
    x = torch.ones(HEADS, 70, D).half()
    assert check(empty(4), Spec(4), x, x, 3, 0)[:, :3].all()


def test_keys_and_values_that_do_not_belong_together_are_refused():
    kept, x = empty(4), torch.zeros(HEADS, 8, D).half()
    with pytest.raises(ValueError, match="k is"):
        ops.keep_outliers(kept, x, x[:, :7], 2, 0)
    with pytest.raises(ValueError, match="k is"):
        ops.keep_outliers(kept, x.int(), x.int(), 2, 0)
