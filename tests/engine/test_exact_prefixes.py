"""Shared prefixes are computed once: what is cached, for which prompts, and for how long."""

import random

import pytest

from disagg.codecs.h2o import H2O
from disagg.codecs.registry import codec_names
from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Prefill
from disagg.kv.page import RAW_TOKENS
from disagg.model.cache import LAST_QUERIES
from disagg.transfer.records import ArenaSource, Manifest
from tests.engine.margins import assert_same, serve_watched
from tests.engine.serving import StandIn, make_engine, request, run_until_idle, serve
from tests.engine.test_engine import Recorder, prefilled
from tests.engine.test_failures import Fuse
from tests.engine.test_turns import SHAPE, Load
from tests.model.tiny import random_prompt

CODECS = [x for x in codec_names() if x != "alignedkv"] + ["0:raw;1-:kivi:bits=2"]
UNIT_BYTES = RAW_TOKENS * SHAPE.layers[0].values_per_token * 4


def counted(engine: Engine) -> tuple[int, int]:
    return engine.counts["computed_tokens"], engine.counts["cached_tokens"]


@pytest.mark.parametrize("length", [15, 16, 17, 64, 130, 300])
def test_a_prompt_that_comes_again_computes_its_last_unit_alone(runner, length):
    prompt = random_prompt(length)
    engine = make_engine(runner)

    expected = serve(engine, [prompt], "raw", 20)
    assert counted(engine) == (length, 0)
    assert serve(engine, [prompt], "raw", 20) == expected
    cached = (length - 1) // RAW_TOKENS * RAW_TOKENS
    assert counted(engine) == (2 * length - cached, cached)


@pytest.mark.parametrize("codec", CODECS)
def test_what_follows_a_known_beginning_is_answered_as_without_it(runner, codec):
    beginning = random_prompt(260)
    first = beginning + random_prompt(40)
    second = beginning + random_prompt(75)[::-1]
    engine = make_engine(runner)
    serve(engine, [first], "raw", 1)  # exact KV is the same for all codecs
    expected = serve_watched(runner, second, codec, 24)
    assert_same(serve(engine, [second], codec, 24)[0], expected)
    assert engine.counts["cached_tokens"] == 256


def test_a_codec_that_looks_at_the_last_queries_has_them_computed(runner):
    assert H2O.last_queries == LAST_QUERIES
    prompt, engine = random_prompt(320), make_engine(runner)
    assert serve(engine, [prompt], "h2o", 20) == serve(engine, [prompt], "h2o", 20)
    assert engine.counts["cached_tokens"] == 320 - LAST_QUERIES


def records_of(engine: Engine, prompt: tuple[int, ...], codec: str) -> list[bytes]:
    """The bytes of a prompt's items, as they are handed off."""
    handoff = Recorder()
    engine.submit(Prefill(request("r", prompt, codec, 2), handoff))
    prefilled(engine)
    checklist = Manifest(handoff.plan, len(prompt))
    source = ArenaSource(engine.pool.arena, checklist, handoff.groups)
    records = [bytes(data) for data in source.read(checklist.items)]
    engine.submit(Abort("r"))
    run_until_idle(engine)
    return records


@pytest.mark.parametrize(
    "codec", ["raw", "kivi:bits=2,residual=0", "banded:bits=3", "ott"]
)
def test_records_are_the_same_to_the_bit_where_chunks_are_cut_alike(runner, codec):
    """The chunk behind a known beginning is computed as it was: from the same exact K and V."""
    prompt = tuple(random_prompt(256))
    cold, warm = (make_engine(runner, max_batch_tokens=64) for _ in range(2))
    serve(warm, [prompt[:192]], "raw", 1)
    assert records_of(warm, prompt, codec) == records_of(cold, prompt, codec)
    assert counted(warm) == (192 + 64, 192)


def test_prompts_that_are_scored_are_computed_whole(runner):
    engine = make_engine(runner)
    prompt, how = random_prompt(100), {"logprobs": 1, "prompt_logprobs": True}
    serve(engine, [prompt], "raw", 2)
    for _ in range(2):
        serve(engine, [prompt], "raw", 2, **how)
    assert counted(engine) == (300, 0)


def test_nothing_is_known_where_it_is_turned_off(runner):
    engine = make_engine(runner, prefix_cache=False)
    for _ in range(2):
        serve(engine, [random_prompt(100)], "raw", 2)
    assert counted(engine) == (200, 0)
    assert not engine.pool.cached_pages


def test_chunks_of_a_prompt_that_is_given_up_are_of_use_to_the_next(runner):
    engine = make_engine(runner, max_batch_tokens=64)
    prompt = random_prompt(200)
    engine.submit(Prefill(request("gone", prompt, "raw", 2)))
    engine.step()
    engine.submit(Abort("gone"))
    run_until_idle(engine)
    serve(engine, [prompt], "raw", 2)
    assert engine.counts["cached_tokens"] == 64


def test_a_step_that_breaks_leaves_nothing_to_share(runner):
    engine = make_engine(StandIn(runner, Fuse(runner.forward, at=1, done=True)))
    engine.submit(Prefill(request("a", random_prompt(100), "raw", 2)))
    assert engine.step().failed
    assert not engine.pool.cached_pages
    answers = serve(engine, [random_prompt(100)], "raw", 2)
    assert answers == serve(make_engine(runner), [random_prompt(100)], "raw", 2)


def test_sequences_take_the_room_of_what_is_only_kept(runner):
    """A pool full of exact pages of the past refuses nobody, and never counts as used."""
    engine = make_engine(runner, arena_bytes=8 << 20)
    for number in range(12):
        prompt = [(number * 31 + i) % 50 + 3 for i in range(250)]
        serve(engine, [prompt], "raw", 3)  # run until idle: nothing is owned then
    assert engine.pool.cached_bytes > engine.pool.arena.nbytes / 3


class IdealLru:
    """Prefixes in units, the least recently used of all going first; ends before beginnings."""

    def __init__(self, units: int):
        self.units = units
        self.order: dict[tuple[int, ...], None] = {}

    def hits(self, prompt: tuple[int, ...]) -> int:
        """Cached leading units of a prompt; afterwards all its units are cached."""
        ends = range(RAW_TOKENS, len(prompt) + 1, RAW_TOKENS)
        keys = [prompt[:end] for end in ends]
        usable = keys[: (len(prompt) - 1) // RAW_TOKENS]
        num_cached = 0
        while num_cached < len(usable) and usable[num_cached] in self.order:
            num_cached += 1
        for key in reversed(keys):
            self.order.pop(key, None)
            self.order[key] = None
        while len(self.order) > self.units:
            del self.order[next(iter(self.order))]
        return num_cached


def test_hits_are_those_of_an_ideal_lru_of_the_same_size():
    """Conversations that grow turn by turn, more of them than there is room for."""
    load = Load(arena_bytes=8 << 20)
    pick = random.Random(3)
    # an eighth is spared, one slab or two are used
    room = load.engine.pool.arena.nbytes * 3 // 4
    ideal = IdealLru(room // UNIT_BYTES)
    expected = total = 0
    chats = [[pick.randrange(4000) for _ in range(64)] for _ in range(40)]
    for number in range(400):
        chat = chats[int(len(chats) * pick.random() ** 2)]
        chat += [pick.randrange(4000) for _ in range(pick.randrange(8, 60))]
        if len(chat) > 900:
            del chat[64:]
        expected += RAW_TOKENS * ideal.hits(tuple(chat))
        total += len(chat)
        load.engine.submit(Prefill(request(str(number), chat, "kivi:bits=2", 1)))
        while not load.engine.idle:
            load.engine.step()
    computed, cached = counted(load.engine)
    assert computed + cached == total
    assert load.engine.pool.cached_bytes == room
    assert total / 3 < cached
    assert cached == pytest.approx(expected, rel=0.05)


def test_who_starts_again_has_nothing_of_its_own_as_cached(runner):
    engine = make_engine(runner)
    engine.submit(Prefill(request("a", random_prompt(130), "kivi", 3)))
    first = engine.step()
    victim = engine._scheduler.preempt()
    engine._on_preempted(victim)
    tokens = first.tokens + run_until_idle(engine).tokens
    assert engine.counts["cached_tokens"] == 128
    assert [(x.index, x.cached_tokens) for x in tokens] == [(0, 0), (1, 0), (2, 0)]
