"""States that a layer reads and overwrites in their records: the same numbers, and fewer copies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kv.page import ARENA_UNIT, make_state_layout, units_for
from disagg.model.runner import Runner
from disagg.model.states.records import LARGE_BYTES, StateRecords
from tests.engine.forced import forced_logits
from tests.model.recorders import EagerRecorder
from tests.model.tiny import random_prompt
from tests.model.written import WrittenBytes

SHAPE = (16, 32, 33)
LAYOUT = make_state_layout([("recurrent0", "float32", SHAPE)])
UNITS = units_for(LAYOUT.block_bytes)
STATE_BYTES = 4 * 16 * 32 * 33
RECORDS = 8  # in the arena
SCRATCH = 7  # the record of all padded rows
PLACES = {
    "even": [0, 2, 4],
    "uneven": [5, 0, 1],
    "padded": [3, 1, SCRATCH, SCRATCH],
    "single": [6],
}

Layer = Callable[[Tensor, Tensor], Tensor]  # of a state and its decay; the new state


def mamba(state: Tensor, decay: Tensor) -> Tensor:
    """It changes its state where it is."""
    state.copy_(state * decay + 1)
    return state


def delta(state: Tensor, decay: Tensor) -> Tensor:
    """It leaves its state as it is."""
    return decay[..., :1, :1] * state.to(decay) - 1


def slices(state: Tensor, decay: Tensor) -> Tensor:
    """It changes views of its state, and overwrites it behind their back."""
    first = state[:, 0]
    first.mul_(2)
    state.copy_(state.roll(1, -1) * decay)
    first.add_(1)
    state *= 3
    return state


LAYERS = [mamba, delta, slices]


@dataclass
class Arena:
    """Records with random states. pages: of those of a batch; before: the states of all records"""

    records: StateRecords
    pages: Tensor
    before: Tensor

    @classmethod
    def random(cls, places: list[int]) -> "Arena":
        size = RECORDS * UNITS * ARENA_UNIT
        records = StateRecords(torch.empty(size, dtype=torch.uint8), LAYOUT)
        arena = cls(records, UNITS * torch.tensor(places, dtype=torch.int32), Tensor())
        before = torch.randn(RECORDS, *SHAPE)
        for state, own_state in zip(arena.states(), before, strict=True):
            state.copy_(own_state)
        arena.before = before
        return arena

    def states(self) -> list[Tensor]:
        """Those of all records, where they are."""
        pages = range(0, RECORDS * UNITS, UNITS)
        return [self.records.views(page)["recurrent0"][0] for page in pages]

    def run(self, layer: Layer, decay: Tensor) -> None:
        """One step of a batch, as a split layer runs it."""
        states = self.records.gather(self.pages)
        new_states = {"recurrent0": layer(states["recurrent0"], decay)}
        self.records.scatter(self.pages, states | new_states)


def test_states_of_the_tests_are_large():
    assert STATE_BYTES >= LARGE_BYTES


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_a_step_is_that_of_a_batch_of_copies(places, layer, context):
    """Bit for bit; padded rows change the scratch record alone."""
    arena = Arena.random(places)
    decay = torch.rand(len(places), *SHAPE)
    expected = arena.before.clone()
    expected[places] = layer(arena.before[places], decay)

    with context():
        arena.run(layer, decay)

    for place, state in enumerate(arena.states()):
        assert place == SCRATCH or torch.equal(state, expected[place])


def test_a_layer_that_changes_its_states_in_place_copies_none():
    """It writes a product, a sum, and each state once."""
    arena = Arena.random([5, 0, 1, 2])
    decay = torch.rand(4, *SHAPE)

    with WrittenBytes() as written:
        arena.run(mamba, decay)

    assert written.nbytes == 3 * 4 * STATE_BYTES


def test_a_layer_that_gives_new_states_copies_them_once():
    """It writes a product, a difference, and each state once."""
    arena = Arena.random([5, 0, 1, 2])
    decay = torch.rand(4, *SHAPE)

    with WrittenBytes() as written:
        arena.run(delta, decay)

    assert written.nbytes == 3 * 4 * STATE_BYTES


FACTORS = {
    "number": 2.0,
    "scalar": torch.tensor(2.0),
    "one row": torch.rand(33),
    "one state": torch.rand(1, 1, 1, 33),
    "one number each": torch.rand(3, 1, 1, 1),
    "other dtype": torch.rand(3, 1, 1, 1).double(),
    "larger": torch.rand(5, 3, 16, 32, 33),
}


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_products_with_any_factor_are_those_of_copies(factor):
    arena = Arena.random([5, 0, 1])
    expected = arena.before[[5, 0, 1]]

    states = arena.records.gather(arena.pages)["recurrent0"]

    product = states * factor
    assert product.dtype == (expected * factor).dtype
    assert torch.equal(product, expected * factor)
    assert torch.equal(states * states, expected * expected)


# -- in an engine


@pytest.fixture
def all_large(monkeypatch):
    """States of any size stay where they are."""
    monkeypatch.setattr("disagg.model.states.records.LARGE_BYTES", 0)


@pytest.fixture
def crowd(hybrid) -> Callable[..., dict[str, Tensor]]:
    """Logits of five answers, three at a time: records are freed and used again."""
    prompts = {str(n): random_prompt(n) for n in (5, 1, 9, 3, 2)}

    def serve(runner: Any) -> dict[str, Tensor]:
        codecs = dict.fromkeys(prompts, "raw")
        return forced_logits(runner, prompts, codecs, 4, max_sequences=3)

    return serve


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "jamba"])
def test_answers_are_those_of_copied_states(kind, hybrid, crowd, request):
    expected = crowd(hybrid(kind))

    request.getfixturevalue("all_large")

    logits = crowd(hybrid(kind))
    for rid, own_logits in expected.items():
        assert torch.equal(logits[rid], own_logits)


def test_recorded_steps_are_those_of_copied_states(hybrid, crowd, request):
    """Three rows in a bucket of four: the padded one has its state in the scratch record."""
    runner = Runner.load(str(hybrid("granitemoehybrid").info.path))
    recorder = EagerRecorder()
    runner.record_steps(recorder)
    expected = crowd(runner)
    replayed = recorder.replayed

    request.getfixturevalue("all_large")

    logits = crowd(runner)
    assert recorder.replayed > replayed > 0
    for rid, own_logits in expected.items():
        assert torch.equal(logits[rid], own_logits)
