"""Sequences whose layers keep a state: chunks, recorded steps, little room, hand-offs."""

from dataclasses import replace

import pytest
import torch

from disagg.codecs.planning import parse_plan
from disagg.engine.messages import Prefill
from disagg.engine.sequence import handoff_stats
from disagg.kv.page import ARENA_UNIT, Kind
from disagg.llm import LLM, SamplingParams
from disagg.model.attention import Batch
from disagg.model.runner import Runner
from disagg.model.states.records import StateRecords
from disagg.model.states.step import StateStep
from tests.engine.forced import (
    collect,
    forced_logits,
    make_forced,
    recorded_logits,
)
from tests.engine.serving import (
    Nowhere,
    StandIn,
    make_engine,
    request,
    run_until_idle,
    serve,
)
from tests.model.recorders import EagerRecorder
from tests.model.tiny import random_prompt, save_tiny
from tests.synthetic import relative_error

# the delta rule in one layer, Mamba 2 in the other; both with room for pages in 3 MiB
CROWDED = {
    "qwen3_5_text": {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"],
        "head_dim": 64,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention"] + ["full_attention"] * 3,
        "hidden_size": 256,
        "mamba_n_heads": 32,
    },
}
# the delta rule, Mamba 2, convolutions, delta rule by channels, lightning attention
BITWISE = ["qwen3_5_text", "bamba", "lfm2", "kimi_linear", "bailing_hybrid"]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
TOKENS = 30  # of an answer in little room
NOISE = 1e-4  # of rounding, in another batch


class Notes(Nowhere):
    """A hand-off that notes what is offered, in order."""

    def __init__(self) -> None:
        self.items: list = []

    def offer(self, items) -> None:
        self.items += items


@pytest.fixture
def fresh(hybrid):
    """A hybrid model of its own: recordings stay with a runner."""
    return Runner.load(str(hybrid("granitemoehybrid").info.path))


def states_of(engine, groups) -> list[bytes]:
    """The states of a sequence, as they are in the arena."""
    plan = engine.plan("raw")
    states = []
    for group, state in zip(plan.groups, groups, strict=True):
        if group not in plan.paged:
            start = state.side * ARENA_UNIT
            states.append(bytes(engine.pool.arena.read(start, group.page.block_bytes)))
    return states


# -- hand-offs


def test_a_state_is_offered_once_when_the_last_chunk_has_passed_its_layer(hybrid):
    engine = make_engine(hybrid("qwen3_5_text"), max_batch_tokens=16)
    notes = Notes()
    prompt = request("a", random_prompt(40), "raw", 4)
    engine.submit(Prefill(prompt, handoff=notes))

    engine.step()
    engine.step()
    early = len(notes.items)
    engine.step()

    assert Kind.SIDE not in {item.kind for item in notes.items[:early]}
    # layer 0 is the only one that attends; the model calls it second
    layers = [item.layer for item in notes.items[early:]]
    assert list(dict.fromkeys(layers)) == [1, 0, 2, 3]
    assert layers.count(1) == layers.count(2) == layers.count(3) == 1


def test_what_is_offered_has_the_bytes_of_whole_prompts(hybrid):
    """In one chunk or in several, in records that held NaN before."""
    states = []
    for budget in (64, 16):
        engine = make_engine(hybrid("qwen3_5_text"), max_batch_tokens=budget)
        engine.arena.fill_(0xFF)
        notes = Notes()
        prompt = request("a", random_prompt(40), "raw", 4)
        engine.submit(Prefill(prompt, handoff=notes))
        for _ in range(3):
            engine.step()
        states.append(states_of(engine, notes.groups))

    for whole, chunked in zip(*states, strict=True):
        whole_numbers = torch.frombuffer(bytearray(whole), dtype=torch.float32)
        chunked_numbers = torch.frombuffer(bytearray(chunked), dtype=torch.float32)
        assert relative_error(chunked_numbers, whole_numbers) < NOISE


@pytest.mark.parametrize("kind", BITWISE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_has_the_same_bits_in_all_chunks(kind, dtype, hybrid):
    """Its logits, and its states, of which some follow from K and V."""
    runner = Runner.load(str(hybrid(kind).info.path), dtype)
    prompt = random_prompt(500)
    computed = []
    for budget in (2048, 300):
        engine, forced = make_forced(runner, max_batch_tokens=budget)
        notes = Notes()
        engine.submit(Prefill(request("a", prompt, "raw", 1), handoff=notes))
        while not engine.step().prefilled:
            pass
        computed.append((forced.logits, states_of(engine, notes.groups)))

    (whole_logits, whole_states), (logits, states) = computed
    assert torch.equal(logits, whole_logits)
    assert states == whole_states


def test_chunks_end_at_pieces(hybrid):
    """The rest of a budget is not the beginning of a piece, unless it completes a prompt."""
    runner = hybrid("lfm2")
    steps = []

    def forward(batch: Batch) -> torch.Tensor:
        chunks = [(chunk.before, chunk.count) for chunk in batch.chunks]
        steps.append(chunks)
        return runner.forward(batch)

    engine = make_engine(StandIn(runner, forward), max_batch_tokens=300)
    for length in (30, 300, 320):
        prompt = request(str(length), random_prompt(length), "raw", 9, ignore_eos=True)
        engine.submit(Prefill(prompt))

    run_until_idle(engine)

    assert steps[:4] == [[(0, 30), (0, 256)], [(256, 44)], [(0, 256)], [(256, 64)]]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid"])
def test_an_answer_after_a_hand_off_is_that_of_one_engine(kind, hybrid):
    runner = hybrid(kind)
    prompt = random_prompt(70)
    (expected,) = serve(make_engine(runner), [prompt], "raw", 12)

    llm = LLM(str(runner.info.path), codec="raw")
    (completion,) = llm.generate([prompt], GREEDY)

    assert list(completion.tokens) == expected
    assert completion.kv.payload_bytes > runner.shape.state_bytes


def test_the_figures_of_a_hand_off_count_states_apart(hybrid):
    shape = hybrid("qwen3_5_text").shape
    without = handoff_stats(parse_plan("raw", replace(shape, states=())), 300, 0)

    stats = handoff_stats(parse_plan("raw", shape), 300, 0)

    assert stats.state_bytes == shape.state_bytes
    assert stats.resident_bytes == without.resident_bytes + shape.state_bytes
    assert stats.fp16_bytes == without.fp16_bytes


# -- little room


@pytest.mark.parametrize("kind", CROWDED)
def test_sequences_that_lost_their_states_compute_them_again(kind, tmp_path):
    """Prompt and answer so far are replayed, some tokens at once."""
    runner = Runner.load(str(save_tiny(kind, tmp_path, **CROWDED[kind])))
    prompts = {str(n): random_prompt(n) for n in (120, 130, 140, 150)}
    codecs = dict.fromkeys(prompts, "raw")
    expected = forced_logits(runner, prompts, codecs, TOKENS)
    tight, forced = make_forced(runner, arena_bytes=3 << 20, watermark=0.0)
    for rid, prompt in prompts.items():
        tight.submit(Prefill(request(rid, prompt, "raw", TOKENS)))

    answers = collect(tight, forced)

    assert tight.counts["preempted"] > 0
    for rid, logits in expected.items():
        own = [x for x in answers if x.token.rid == rid]
        assert [x.token.index for x in own] == list(range(TOKENS))
        assert relative_error(torch.stack([x.logits for x in own]), logits) < 1e-3


# -- steps


def test_a_step_gathers_each_state_once_for_all_rows(hybrid, monkeypatch):
    engine = make_engine(hybrid("qwen3_5_text"))
    for rid in range(16):
        engine.submit(Prefill(request(str(rid), random_prompt(5), "raw", 8)))
    while engine.step().prefilled:
        pass
    copies = []
    for name in ("gather", "scatter"):
        copy = getattr(StateRecords, name)

        def noted(records, pages, *states, name=name, copy=copy):
            copies.append((name, len(pages)))
            return copy(records, pages, *states)

        monkeypatch.setattr(StateRecords, name, noted)

    assert len(engine.step().tokens) == 16

    assert copies == [("gather", 16), ("scatter", 16)] * 3
    run_until_idle(engine)


# -- recorded steps


def test_a_recording_advances_no_state(fresh):
    """It runs the step itself too: the states of its rows would advance by two tokens for one."""
    prompts = {str(n): random_prompt(n) for n in (5, 23, 40)}
    codecs = dict.fromkeys(prompts, "raw")
    expected = forced_logits(fresh, prompts, codecs, 8)

    replayed = recorded_logits(fresh, prompts, codecs, 8)

    for rid, logits in expected.items():
        assert relative_error(replayed[rid], logits) < NOISE


def test_padded_rows_write_to_no_page(fresh):
    """Three rows in a bucket of four: the fourth has its states behind all pages."""
    written = []
    for recorder in (None, EagerRecorder()):
        if recorder is not None:
            fresh.record_steps(recorder)
        engine = make_engine(fresh)
        engine.arena.fill_(0xFF)
        serve(engine, [random_prompt(n) for n in (5, 23, 40)], "raw", 6)
        pages = engine.arena[: engine.pool.arena.nbytes].view(-1, ARENA_UNIT)
        written.append(pages.ne(0xFF).any(1))
        scratch = engine.arena[engine.pool.arena.nbytes :]

    assert torch.equal(*written)
    assert scratch.ne(0xFF).any()


def test_a_model_without_states_has_no_record_behind_its_pages(runner):
    engine = make_engine(runner)
    batches = []
    forward = runner.forward

    def noted(batch):
        batches.append(batch.states)
        return forward(batch)

    engine._runner.forward = noted
    try:
        engine.submit(Prefill(request("a", random_prompt(40), "raw", 4)))
        run_until_idle(engine)
    finally:
        del engine._runner.forward

    assert set(batches) == {StateStep()}
    assert engine.arena.numel() == engine.pool.arena.nbytes
