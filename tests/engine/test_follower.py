"""A follower with all heads of a model: it writes and offers what the engine of rank 0 does."""

from typing import Any

import pytest

from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.follower import Follower
from disagg.engine.messages import Prefill
from disagg.engine.orders import ArenaOrder, Order, StepOrders
from tests.engine.serving import request
from tests.model.tiny import random_prompt

LENGTH, CHUNK = 130, 48


class Offered:
    """A hand-off that notes what it is offered, and when all is computed."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.computed_at: int | None = None  # items

    def begin(self, plan: Any, groups: Any) -> None:
        self.plan, self.groups = plan, groups

    def offer(self, items: Any) -> None:
        self.items += items

    def has(self, item: Any) -> bool:
        return False

    def computed(self) -> None:
        self.computed_at = len(self.items)


class Pair:
    """An engine whose orders a follower in the same process obeys."""

    def __init__(self, runner: Any, handoffs: dict[str, Offered]):
        self._runner = runner
        self._handoffs = handoffs
        config = EngineConfig(
            arena_bytes=8 << 20,
            max_batch_tokens=CHUNK,
            speculative_tokens=0,
            chunk_s=None,
        )
        self.engine = Engine(runner, config, orders=StepOrders(self.obey))

    def obey(self, order: Order) -> None:
        if isinstance(order, ArenaOrder):
            self.follower = Follower(self._runner, order, self._handoffs)
        else:
            self.follower.step(order)

    def prefill(self, codec: str) -> Offered:
        """Compute a prompt that is handed over; what rank 0 offers."""
        handoff = Offered()
        asked = request("r", random_prompt(LENGTH), codec, 5)
        self.engine.submit(Prefill(asked, handoff))
        while not self.engine.step().prefilled:
            pass
        return handoff


@pytest.mark.parametrize("codec", ["raw", "kivi"])
def test_a_follower_offers_what_rank_0_offers(runner, codec):
    handoff = Offered()
    pair = Pair(runner, {"r": handoff})

    of_rank_0 = pair.prefill(codec)

    assert handoff.items == of_rank_0.items
    assert handoff.plan == of_rank_0.plan
    assert [x.ids() for x in handoff.groups] == [x.ids() for x in of_rank_0.groups]


def test_a_hand_off_is_computed_with_its_last_chunk(runner):
    handoff = Offered()

    Pair(runner, {"r": handoff}).prefill("kivi")

    assert handoff.computed_at == len(handoff.items) > 0


def test_a_hand_off_that_was_given_up_is_computed_nowhere(runner):
    pair = Pair(runner, {})

    assert pair.prefill("kivi").items
