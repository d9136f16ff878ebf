"""Chunks of prompts are as large as decoding sequences can wait for."""

from disagg.config import EngineConfig
from disagg.engine.chunk_time import LEAST_TOKENS, ChunkTime
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.model.states.step import PIECE_TOKENS
from tests.engine.serving import (
    StandIn,
    answers,
    joined,
    request,
    run_until_idle,
    serve,
)
from tests.model.tiny import random_prompt

TOKEN_S = 0.001
STEP_S = 0.01


class Slow(StandIn):
    """A runner on which a token of a prompt takes TOKEN_S, and a step at least STEP_S."""

    def __init__(self, runner):
        super().__init__(runner)
        self.now = 0.0
        self.chunks = []

    def forward(self, batch):
        chunk = sum(x.count for x in batch.chunks)
        self.chunks.append((chunk, bool(batch.decodes)))
        self.now += STEP_S + TOKEN_S * chunk
        return self._runner.forward(batch)


def engine_of(slow, chunk_s, **config):
    config = EngineConfig(arena_bytes=32 << 20, chunk_s=chunk_s, **config)
    return Engine(slow, config, clock=lambda: slow.now)


def learned(limit_s, *steps):
    chunk_time = ChunkTime(limit_s)
    chunk_time.learn(0, STEP_S)
    for tokens, seconds in steps:
        chunk_time.learn(tokens, seconds)
    return chunk_time


def test_a_chunk_fits_the_limit_and_the_kernels_of_layers():
    chunk_time = learned(0.5, (1000, 1.0 + STEP_S))

    assert chunk_time.fit(2048, decoding=0) == 480
    assert chunk_time.fit(2048, decoding=20) == 512 - 20


def test_the_time_of_decoding_is_not_the_prompts():
    busy = learned(0.5, *[(0, 0.5)] * 40, (1000, 1.5))

    assert busy.fit(2048, decoding=0) == 480


def test_a_chunk_is_never_too_small_to_be_worth_its_step():
    assert learned(0.001, (1000, 1.0)).fit(2048, 0) == LEAST_TOKENS
    assert learned(0.001, (1000, 1.0)).fit(20, 0) == 20


def test_a_chunk_beside_any_number_of_decoding_tokens_has_its_least_size():
    slow = learned(0.001, (1000, 1.0))

    for decoding in range(6000):
        assert slow.fit(2048, decoding) >= LEAST_TOKENS


def test_without_a_limit_or_measurement_a_chunk_is_whole():
    without_decoding = ChunkTime(0.2)
    without_decoding.learn(1000, 1.0)

    for chunk_time in (learned(None, (1000, 1.0)), learned(0.2), without_decoding):
        assert chunk_time.fit(2048, 0) == 2048


def test_a_long_prompt_arrives_in_pieces_beside_decoding(runner):
    slow = Slow(runner)
    engine = engine_of(slow, chunk_s=0.4)
    engine.submit(Prefill(request("short", random_prompt(150), "raw", 60)))
    outputs = []
    while slow.chunks[-1:] != [(0, True)]:
        outputs.append(engine.step())
    engine.submit(Prefill(request("long", random_prompt(480), "raw", 2)))

    tokens = answers(joined([*outputs, run_until_idle(engine)]))

    beside = [chunk for chunk, decodes in slow.chunks if chunk and decodes]
    assert len(beside) == 2
    assert LEAST_TOKENS < max(beside) <= 0.4 / TOKEN_S
    assert len(tokens["long"]) == 2


def test_a_chunk_of_a_hybrid_has_room_for_a_piece_beside_decoding(hybrid):
    """Three decoding rows and 256 more are no number of rows that layers have kernels for."""
    slow = Slow(hybrid("lfm2"))
    engine = engine_of(slow, chunk_s=0.1)
    for length in (150, 20, 21):
        prompt = random_prompt(length)
        engine.submit(Prefill(request(str(length), prompt, "raw", 60, ignore_eos=True)))
    while slow.chunks[-1:] != [(0, True)]:
        engine.step()
    engine.submit(Prefill(request("long", random_prompt(480), "raw", 2)))

    run_until_idle(engine)

    beside = [chunk for chunk, decodes in slow.chunks if chunk and decodes]
    assert beside == [PIECE_TOKENS, 480 - PIECE_TOKENS]


def test_a_prompt_alone_is_computed_whole(runner):
    slow = Slow(runner)

    serve(engine_of(slow, chunk_s=0.1), [random_prompt(400)], "raw", 2)

    assert slow.chunks[0] == (400, False)
