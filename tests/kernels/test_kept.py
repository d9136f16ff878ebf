"""Tokens compete for the slots of a head: who wins, where they lie, what happens without room."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from disagg.kernels import ops
from disagg.kernels.formats import FREE, POOL, RETIRED, SlotsFormat
from disagg.kernels.reference.kept import KeptSlots, view_kept
from tests.kernels.cases import DEVICE, raw_format

HEADS = 3
D = 48


def empty_slots(count: int) -> KeptSlots:
    """A side record whose planes are views with odd strides, as they are in an arena."""
    states = 8 * count + (-8 * count) % 16
    raw_pages = -(-count // 16)
    fmt = SlotsFormat(
        slots=count,
        block_bytes=states + 16 * raw_pages + 16,
        positions=0,
        scores=4 * count,
        states=states,
    )
    side = torch.zeros(HEADS, fmt.block_bytes, dtype=torch.uint8, device=DEVICE)
    raw = raw_format("float16", D)
    shape = (raw_pages, HEADS, raw.block_bytes)
    blocks = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
    return view_kept(side, blocks, fmt, raw)


def keys(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sums of these are exact; norms of some tokens are equal."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, HEADS, n, D)
    eighths = torch.randint(-40, 40, shape, generator=generator)
    k, v = eighths.half() / 8
    k[:, n // 2] = k[:, n // 3].flip(1)
    return k, v


@dataclass(eq=False)
class Slot:
    position: int
    score: float
    state: int
    k: Tensor
    v: Tensor


class Spec:
    """The same in plain Python: a list of slots for each head."""

    def __init__(self, room: int):
        self.slots: list[list[Slot]] = [[] for _ in range(HEADS)]
        self.room = room

    def keep(
        self,
        k: Tensor,
        v: Tensor,
        count: int,
        first: int,
    ) -> list[list[bool]]:
        """The winners of each head, and these in its slots."""
        return [
            self._keep_in_head(slots, tokens_of(head_k, head_v, first), count)
            for slots, head_k, head_v in zip(self.slots, k, v, strict=True)
        ]

    def _keep_in_head(
        self,
        slots: list[Slot],
        tokens: list[Slot],
        count: int,
    ) -> list[bool]:
        pool = [slot for slot in slots if slot.state == POOL]
        by_score = sorted([*pool, *tokens], key=lambda slot: slot.score)
        best = by_score[:count]
        winners = [token for token in tokens if token in best]
        if len(slots) + len(winners) > self.room:
            return [False] * len(tokens)
        for slot in pool:
            if slot not in best:
                slot.state = RETIRED
        slots += winners
        return [token in winners for token in tokens]


def tokens_of(k: Tensor, v: Tensor, first: int) -> list[Slot]:
    """The tokens of one head, as they would lie in its slots."""
    scores = k.float().abs().sum(1).tolist()
    return [
        Slot(
            position=first + i,
            score=score,
            state=POOL,
            k=k[i],
            v=v[i],
        )
        for i, score in enumerate(scores)
    ]


def assert_head_holds(actual: KeptSlots, head: int, slots: list[Slot]) -> None:
    """A head's slots, in order, and no others."""
    n = len(slots)
    positions = [slot.position for slot in slots]
    scores = [slot.score for slot in slots]
    states = [slot.state for slot in slots]
    assert actual.positions[head, :n].tolist() == positions
    assert actual.scores[head, :n].tolist() == scores
    assert actual.states[head, :n].tolist() == states
    assert (actual.states[head, n:] == FREE).all()
    for i, slot in enumerate(slots):
        assert torch.equal(actual.k[head, i].cpu(), slot.k)
        assert torch.equal(actual.v[head, i].cpu(), slot.v)


def check(
    actual: KeptSlots,
    spec: Spec,
    k: Tensor,
    v: Tensor,
    count: int,
    first: int = 0,
) -> Tensor:
    """Let tokens compete in both, compare all slots, and return the winners."""
    expected = spec.keep(k, v, count, first)

    won = ops.keep_outliers(
        actual,
        k.to(DEVICE),
        v.to(DEVICE),
        count,
        first,
    )

    assert won.tolist() == expected
    for head, slots in enumerate(spec.slots):
        assert_head_holds(actual, head, slots)
    return won.cpu()


@pytest.mark.parametrize(
    ("room", "count"),
    [
        (7, 3),
        (20, 20),
        (5, 0),
    ],
)
def test_the_tokens_of_smallest_keys_win_and_lie_in_order(room, count):
    k, v = keys(700, seed=1)

    won = check(empty_slots(room), Spec(room), k, v, count)

    assert (won.sum(1) == count).all()


def test_pages_compete_with_the_pool_until_slots_are_full():
    slots = empty_slots(6)
    spec = Spec(6)

    for page in range(8):
        k, v = keys(65, seed=page)
        k[0] *= 1 - page / 8  # ever better tokens: this head runs out of slots
        check(slots, spec, k, v, count=2, first=65 * page)

    in_pool = (slots.states == POOL).sum(1)
    assert not (slots.states[0] == FREE).any()
    assert (slots.states == RETIRED).any()
    assert (in_pool == 2).all()


def test_fewer_tokens_than_slots_all_win():
    k, v = keys(4, seed=5)

    won = check(
        empty_slots(9),
        Spec(9),
        k,
        v,
        count=8,
        first=16,
    )

    assert won.all()


def test_of_equal_tokens_the_earlier_wins():
    x = torch.ones(HEADS, 70, D).half()

    won = check(empty_slots(4), Spec(4), x, x, count=3)

    assert won[:, :3].all()


def test_keys_and_values_that_do_not_belong_together_are_refused():
    slots = empty_slots(4)
    x = torch.zeros(HEADS, 8, D).half()

    with pytest.raises(ValueError, match="k is"):
        ops.keep_outliers(slots, x, x[:, :7], 2, 0)
    with pytest.raises(ValueError, match="k is"):
        ops.keep_outliers(slots, x.int(), x.int(), 2, 0)
