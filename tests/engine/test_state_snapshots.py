"""Prompts of hybrid models resume cached prefixes: from which tokens, and at what cost."""

from collections.abc import Sequence

import pytest
import torch

from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Prefill
from disagg.kv import snapshot_borders
from disagg.kv.page import ARENA_UNIT
from disagg.llm import LLM, SamplingParams
from disagg.model.runner import Runner
from disagg.router.prefix_index import keys_of
from disagg.router.request_state import token_array
from disagg.router.worker_state import WorkerState
from disagg.transfer.messages import Role, WorkerInfo
from tests.engine.forced import collect, forced_logits, make_forced
from tests.engine.margins import assert_same, serve_watched
from tests.engine.serving import (
    StandIn,
    answers,
    joined,
    make_engine,
    request,
    run_until_idle,
    serve,
)
from tests.engine.test_failures import Fuse
from tests.engine.test_hybrids import CROWDED, NOISE, TOKENS, Notes, states_of
from tests.model.recorders import EagerRecorder
from tests.model.tiny import random_prompt, save_tiny
from tests.synthetic import relative_error

# the delta rule, Mamba 2, Mamba 1, convolutions, and convolutions beside a window
KINDS = ["qwen3_5_text", "granitemoehybrid", "jamba", "lfm2", "lfm3"]
SYSTEM = random_prompt(160, seed=1)
CODEC = "raw"
ANSWER = 8  # tokens


class Continuing(StandIn):
    """A runner whose states are worth a snapshot, also those of Mamba 1."""

    continues_chunks = True


def counted(engine: Engine) -> tuple[int, int]:
    return engine.counts["computed_tokens"], engine.counts["cached_tokens"]


def snapshots_of(engine: Engine) -> Sequence[bytes]:
    """The keys of the cached snapshots, those used last at the end."""
    snapshots = engine._prompts._snapshots
    assert snapshots is not None
    return engine.pool.kept_of(snapshots._keys)


def questions(count: int, length: int = 60) -> list[list[int]]:
    """Prompts that share a system prompt."""
    return [SYSTEM + random_prompt(length, seed=10 + i) for i in range(count)]


# -- what is resumed


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_of_a_chat_computes_what_is_new(kind, hybrid):
    """The border is in the middle of a chunk."""
    runner = hybrid(kind)
    turn = SYSTEM + random_prompt(40)
    next_turn = turn + random_prompt(50)
    expected = serve_watched(runner, next_turn, CODEC, ANSWER)
    engine = make_engine(Continuing(runner), max_batch_tokens=50)
    serve(engine, [turn], CODEC, ANSWER)

    (tokens,) = serve(engine, [next_turn], CODEC, ANSWER)

    assert_same(tokens, expected)
    assert engine.counts["cached_tokens"] == 192


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm3"])
def test_the_third_prompt_resumes_what_two_have_shared(kind, hybrid):
    """The second one knows where the shared part ends, and takes the snapshot."""
    runner = hybrid(kind)
    prompts = questions(3)
    expected = serve_watched(runner, prompts[-1], CODEC, ANSWER)
    engine = make_engine(runner)
    cached = []
    for prompt in prompts:
        tokens = serve(engine, [prompt], CODEC, ANSWER)
        cached.append(engine.counts["cached_tokens"])

    assert_same(tokens[0], expected)
    assert cached == [0, 0, 160]


def test_the_same_prompt_computes_its_last_tokens_alone(hybrid):
    engine = make_engine(hybrid("qwen3_5_text"))
    prompt = random_prompt(200)

    first, second = (serve(engine, [prompt], CODEC, ANSWER) for _ in range(2))

    assert second == first
    assert counted(engine) == (200 + 8, 192)


def test_a_prompt_resumes_from_the_longest_of_its_snapshots(hybrid):
    engine = make_engine(hybrid("qwen3_5_text"))
    prompt = random_prompt(400)
    for length in (100, 200, 300):
        serve(engine, [prompt[:length]], CODEC, 1)
    before = engine.counts["cached_tokens"]

    serve(engine, [prompt], CODEC, 1)

    assert engine.counts["cached_tokens"] - before == 288


def test_a_snapshot_holds_the_states_of_the_tokens_before_it(hybrid):
    """In records that held NaN before."""
    prompt = random_prompt(200)
    states = []
    for length in (192, 200):
        engine = make_engine(hybrid("qwen3_5_text"))
        engine.arena.fill_(0xFF)
        notes = Notes()
        engine.submit(Prefill(request("a", prompt[:length], CODEC, 1), handoff=notes))
        engine.step()
        if length == 192:
            states.append(states_of(engine, notes.groups))
    (key,) = snapshots_of(engine)
    (snapshot,) = engine.pool.take([key])
    sizes = map(len, states[0])
    spans = zip(snapshot.pages, sizes, strict=True)
    read = engine.pool.arena.read
    states.append([bytes(read(page * ARENA_UNIT, size)) for page, size in spans])

    for expected, copied in zip(*states, strict=True):
        numbers = torch.frombuffer(bytearray(copied), dtype=torch.float32)
        expected_numbers = torch.frombuffer(bytearray(expected), dtype=torch.float32)
        assert relative_error(numbers, expected_numbers) < NOISE


def test_a_resumed_prompt_is_handed_off_as_a_cold_one(hybrid):
    llm = LLM(str(hybrid("qwen3_5_text").info.path), codec=CODEC)
    greedy = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    prompt = random_prompt(150)

    (cold,), (resumed,) = (llm.generate([prompt], greedy) for _ in range(2))

    assert list(resumed.tokens) == list(cold.tokens)
    assert resumed.kv.cached_tokens == 128


def test_a_short_prompt_leaves_no_snapshot(hybrid):
    engine = make_engine(hybrid("qwen3_5_text"))
    for _ in range(2):
        serve(engine, [random_prompt(70)], CODEC, ANSWER)

    assert not snapshots_of(engine)
    assert counted(engine) == (140, 0)


def test_states_that_go_on_token_by_token_are_computed_in_full(hybrid):
    """Mamba 1: a chunk behind a snapshot would take longer than the whole prompt."""
    engine = make_engine(hybrid("jamba"))
    for _ in range(2):
        serve(engine, [random_prompt(100)], CODEC, 1)

    assert engine.most_snapshots == 0
    assert counted(engine) == (200, 0)


def test_routers_expect_the_snapshots_that_engines_take(hybrid):
    """Prompts that grow and prompts that share a beginning, cut where routers look."""
    engine = make_engine(hybrid("qwen3_5_text"))
    info = WorkerInfo("p", Role.PREFILL, "p", 1, snapshots=engine.most_snapshots)
    worker = WorkerState(info)
    story = random_prompt(400)
    ends = [(72, 0), (200, 1), (328, 2), (128, 70), (128, 71), (128, 80), (392, 3)]
    expected, resumed = [], []
    for shared, more in ends:
        prompt = story[:shared] + random_prompt(more, seed=3)
        keys = keys_of(token_array(prompt))
        expected.append(min(worker.resumable_tokens(keys), len(prompt) - 1))
        worker.add_prompt(keys, len(prompt))
        before = engine.counts["cached_tokens"]
        serve(engine, [prompt], CODEC, 1)
        resumed.append(engine.counts["cached_tokens"] - before)

    assert resumed == expected
    assert len(set(resumed)) > 3


def test_prompts_that_are_scored_are_computed_whole(hybrid):
    engine = make_engine(hybrid("qwen3_5_text"))
    for _ in range(2):
        how = {"logprobs": 1, "prompt_logprobs": True}
        serve(engine, [random_prompt(100)], CODEC, 2, **how)

    assert counted(engine) == (200, 0)


# -- what ends in the middle


def test_a_long_prompt_that_was_aborted_resumes_on_its_way(hybrid, monkeypatch):
    monkeypatch.setattr(snapshot_borders, "FAR_TOKENS", 128)
    runner = hybrid("qwen3_5_text")
    prompt = random_prompt(400)
    expected = serve_watched(runner, prompt, CODEC, ANSWER)
    engine = make_engine(runner, max_batch_tokens=100)
    engine.submit(Prefill(request("aborted", prompt, CODEC, ANSWER)))
    for _ in range(3):
        engine.step()
    engine.submit(Abort("aborted"))
    run_until_idle(engine)

    (tokens,) = serve(engine, [prompt], CODEC, ANSWER)

    assert_same(tokens, expected)
    assert engine.counts["cached_tokens"] == 256


def test_a_step_that_breaks_leaves_no_snapshot(hybrid):
    """Some of its layers have copied their states by then."""
    runner = hybrid("qwen3_5_text")
    fuse = Fuse(runner.forward, at=1, done=True)
    engine = make_engine(StandIn(runner, fuse))
    prompt = random_prompt(100)
    engine.submit(Prefill(request("a", prompt, CODEC, 2)))
    failed = engine.step().failed
    num_cached = engine.pool.cached_pages

    answers = serve(engine, [prompt], CODEC, 2)

    assert len(failed) == 1
    assert num_cached == 0
    assert counted(engine) == (100, 0)
    assert answers == serve(make_engine(runner), [prompt], CODEC, 2)


@pytest.mark.slow
def test_answers_in_little_room_are_those_without_snapshots(tmp_path):
    """Prompts resume, are preempted and start again."""
    kind = "granitemoehybrid"
    runner = Runner.load(str(save_tiny(kind, tmp_path, **CROWDED[kind])))
    lengths = range(24, 84, 10)
    prompts = {str(n): SYSTEM[:96] + random_prompt(n) for n in lengths}
    codecs = dict.fromkeys(prompts, CODEC)
    expected = forced_logits(runner, prompts, codecs, TOKENS, prefix_cache=False)
    tight, forced = make_forced(
        runner, arena_bytes=4 << 20, watermark=0.0, max_batch_tokens=128
    )
    for rid, prompt in prompts.items():
        tight.submit(Prefill(request(rid, prompt, CODEC, TOKENS)))

    answers = collect(tight, forced)

    assert tight.counts["preempted"] > 0
    assert tight.counts["cached_tokens"] > 96
    for rid, logits in expected.items():
        own = [x.logits for x in answers if x.token.rid == rid]
        assert relative_error(torch.stack(own), logits) < 1e-3


# -- room


@pytest.mark.parametrize("evicted", ["snapshot", "a unit"])
def test_a_prefix_that_is_evicted_while_it_is_restored_is_computed(
    evicted, hybrid, monkeypatch
):
    """Another thread may take the room: behind the look at the cache, or behind the states."""
    runner = hybrid("qwen3_5_text")
    prompt = random_prompt(200)
    engine = make_engine(runner)
    expected = serve(engine, [prompt], CODEC, ANSWER)
    snapshots = engine._prompts._snapshots
    read = snapshots._read

    def racing_read(key, sequence):
        if evicted == "snapshot":
            engine.pool.drop(key)
        is_read = read(key, sequence)
        if evicted == "a unit":
            engine.pool.drop(sequence.keys[0][11])
        return is_read

    monkeypatch.setattr(snapshots, "_read", racing_read)

    assert serve(engine, [prompt], CODEC, ANSWER) == expected
    assert counted(engine) == (400, 0)


def test_snapshots_fill_their_share_of_the_arena_at_most(hybrid):
    runner = hybrid("qwen3_5_text")
    share = 3.5 * runner.shape.state_bytes / (32 << 20)
    engine = make_engine(runner, snapshot_share=share)
    prompts = [random_prompt(100, seed=i) for i in range(5)]
    for prompt in [*prompts, prompts[2]]:
        serve(engine, [prompt], CODEC, 1)
    resumed = engine.counts["cached_tokens"]

    serve(engine, [random_prompt(100, seed=9)], CODEC, 1)
    num_snapshots = len(snapshots_of(engine))
    for prompt in (prompts[2], prompts[3]):
        serve(engine, [prompt], CODEC, 1)

    assert num_snapshots == 3
    # the one used again has outlived a younger one
    assert engine.counts["cached_tokens"] - resumed == 80


def test_sequences_take_the_room_of_snapshots(hybrid):
    """A pool full of snapshots refuses nobody: as many steps as in an empty one."""
    steps = []
    for fills in (False, True):
        engine = make_engine(hybrid("qwen3_5_text"), arena_bytes=4 << 20)
        pool = engine.pool
        if fills:
            group = engine.plan(CODEC).groups[-1]
            shape = group.record(group.page)
            pages = pool.allocate(shape, pool.free_pages(shape))
            for page in pages:
                pool.keep(b"snapshot %d" % page, [page], None)
            pool.release(pages)
            assert pool.cached_bytes > 0.9 * pool.arena.nbytes
        before = engine.progress.num_steps
        prompts = [random_prompt(300, seed=i) for i in range(6)]
        serve(engine, prompts, CODEC, 4)
        steps.append(engine.progress.num_steps - before)

    assert steps[0] == steps[1]


def test_a_full_pool_takes_no_snapshot(hybrid):
    """The prompt that passes the border is computed without one."""
    runner = hybrid("qwen3_5_text")
    prompt = random_prompt(120)
    expected = serve_watched(runner, prompt, CODEC, 4)
    engine = make_engine(runner, max_batch_tokens=64)
    engine.submit(Prefill(request("a", prompt, CODEC, 4)))
    engine.step()
    pages = []
    for shape in engine.plan(CODEC).records(len(prompt)):
        pages += engine.pool.allocate(shape, engine.pool.free_pages(shape))

    outputs = [engine.step()]
    num_snapshots = len(snapshots_of(engine))
    engine.pool.release(pages)
    outputs.append(run_until_idle(engine))

    assert num_snapshots == 0
    assert_same(answers(joined(outputs))["a"], expected)


def test_no_snapshot_is_taken_where_they_have_no_share(hybrid):
    engine = make_engine(hybrid("qwen3_5_text"), snapshot_share=0)
    for _ in range(2):
        serve(engine, [random_prompt(100)], CODEC, 2)

    assert counted(engine) == (200, 0)
    assert not engine.pool.cached_pages


# -- what it costs where nothing repeats


def test_a_snapshot_takes_no_step_and_no_row_more(hybrid):
    """Only layers with a state stop at the border; the others see one chunk."""
    batches = []
    for share in (0, 0.5):
        runner = hybrid("qwen3_5_text")
        sizes = []

        def forward(batch, sizes=sizes, runner=runner):
            sizes.append((len(batch.tokens), len(batch.chunks)))
            return runner.forward(batch)

        engine = make_engine(StandIn(runner, forward), snapshot_share=share)
        serve(engine, questions(3), CODEC, 4)
        batches.append(sizes)

    assert batches[0] == batches[1]


def test_recorded_steps_answer_resumed_prompts(hybrid):
    runner = Runner.load(str(hybrid("granitemoehybrid").info.path))
    engine = make_engine(runner)
    prompts = questions(3)
    cold = serve(make_engine(runner), prompts, CODEC, 4)
    recorder = EagerRecorder()
    runner.record_steps(recorder)
    for prompt in prompts[:2]:
        serve(engine, [prompt], CODEC, 1)

    tokens = serve(engine, prompts, CODEC, 4)

    assert tokens == cold
    assert recorder.replayed > recorder.recorded > 0
    assert engine.counts["cached_tokens"] >= 3 * 160
