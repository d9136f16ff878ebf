"""One prompt from its K and V to the bytes that attention reads: the same bytes all the way."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from disagg.codecs.layer import read_blocks
from disagg.codecs.planning import codec_of
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Admit, Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.model.attention import Batch, Chunk
from disagg.model.runner import Runner
from disagg.page import Kind
from disagg.transfer.messages import Credit
from disagg.transfer.receiver import Intake
from disagg.transfer.records import ArenaSource, Checklist
from disagg.transfer.reservations import Admission, Reservations, Terms
from disagg.wire import Buffer, Item, PageFrame, digest, unpack
from disagg.workers.loopback import Loopback
from tests.model.tiny import random_prompt, save_tiny

SPEC = "kivi:bits=2,group=64,residual=64"
PROMPT = tuple(random_prompt(200))


class Tapped(Intake):
    """Writes down the page frames that cross."""

    frames: list[PageFrame]

    def take(self, data: Buffer) -> Credit:
        frame = unpack(data)
        assert isinstance(frame, PageFrame)
        self.frames.append(frame)
        return super().take(data)


class Noted(Loopback):
    """Writes down which frames were out after each offer."""

    layers_out: list[tuple[int, int]]  # layer that was just offered, frames out by then

    def offer(self, items: Sequence[Item]) -> None:
        super().offer(items)
        assert isinstance(self._intake, Tapped)
        self.layers_out.append((items[0].layer, len(self._intake.frames)))


class Walk:
    """Two engines, one prompt handed over and not yet decoded."""

    def __init__(self, runner: Runner):
        config = EngineConfig(arena_bytes=8 << 20)
        self.sender, self.receiver = Engine(runner, config), Engine(runner, config)
        self.plan, pool = self.receiver.plan(SPEC), self.receiver.pool
        terms = Terms(runner.fingerprint, self.receiver.plan, 1, lease_s=1e9)
        self.rules = Reservations(terms, pool, iter([7]).__next__, self.admit, lambda *what: None)
        self.intake = Tapped(self.rules, pool.arena)
        self.intake.frames = []
        self.request = request = Request("a", PROMPT, SamplingParams(max_tokens=4), SPEC)
        self.link = Noted(request, self.intake, self.sender)
        self.link.layers_out = []
        self.sender.submit(Prefill(request, self.link))
        (prefilled,) = self.sender.step().prefilled
        self.link.finish(prefilled)

    def admit(self, admission: Admission) -> None:
        self.groups, first = admission.groups, admission.commit.first_token
        self.receiver.submit(Admit(self.request, self.groups, (first,)))

    def close(self) -> None:
        for engine in (self.sender, self.receiver):
            engine.submit(Abort("a"))
            engine.step()
            engine.pool.check_integrity()
            assert not engine.pool.referenced_pages


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    torch.set_num_threads(1)
    return Runner.load(str(save_tiny("llama", tmp_path_factory.mktemp("tiny"), head_dim=64)))


def exact_kv(runner: Runner) -> dict[int, tuple[Tensor, Tensor]]:
    """K and V of the prompt in every layer, as the model computes them."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def sink(layer: int, k: Tensor, v: Tensor, before: int) -> None:
        found[layer] = (k, v)

    n = len(PROMPT)
    chunk = Chunk(0, n, 0, runner.workspace(n), sink)
    runner.forward(Batch(PROMPT, range(n), [n - 1], torch.empty(0), (chunk,)))
    return found


def test_encoder_wire_pool_and_kernel_have_the_same_bytes(runner: Runner) -> None:
    walk = Walk(runner)
    (group,), (state,) = walk.plan.groups, walk.groups
    checklist = Checklist(walk.plan, len(PROMPT))
    stored = ArenaSource(walk.receiver.pool.arena, checklist, walk.groups)
    sent = {
        item: (named, digest(data))
        for frame in walk.intake.frames
        for item, named, data in zip(frame.items(), frame.digests, frame.payload, strict=True)
    }
    assert list(sent) == list(checklist.items)
    sealed = group.sealed(len(PROMPT))
    assert sealed == 128
    for layer, (k, v) in exact_kv(runner).items():
        blocks = codec_of(group).encode(k[:, :sealed].half(), v[:, :sealed].half(), 0).blocks
        read = read_blocks(group, group.page, layer, walk.receiver.arena, state.page_ids())
        for record in range(sealed // group.page.tokens):
            item = Item(Kind.PAGE, 0, layer, record)
            encoded = digest(blocks[record].numpy().tobytes())
            assert sent[item] == (encoded, encoded)
            assert digest(stored.read([item])[0]) == encoded
            assert digest(read[record].numpy().tobytes()) == encoded
    walk.close()


def test_frames_of_a_layer_are_out_before_the_next_layer_computes(runner: Runner) -> None:
    walk = Walk(runner)
    layers = [layer for layer, _ in walk.link.layers_out]
    frames = [count for _, count in walk.link.layers_out]
    assert layers == [0, 1, 2]
    assert 0 < frames[0] < frames[1] < frames[2] == len(walk.intake.frames)
    walk.close()
