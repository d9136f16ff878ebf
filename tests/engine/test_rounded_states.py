"""States that are rounded once, when their prompt is computed, wherever it decodes."""

import pytest
import torch

from disagg.engine.messages import Abort, Admit, Prefill
from disagg.engine.states import widen_states
from disagg.kv.page import ARENA_UNIT, BF16, EXACT, INT8, Kind
from disagg.kv.state import allocate_group
from disagg.llm import LLM, SamplingParams
from disagg.model.runner import Runner
from disagg.model.states.records import StateRecords
from tests.engine.forced import forced_logits, recorded_logits
from tests.engine.serving import (
    Nowhere,
    joined,
    make_engine,
    request,
    run_until_idle,
    serve,
)
from tests.engine.test_hybrids import Notes
from tests.model.tiny import random_prompt
from tests.synthetic import relative_error

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
STEP = 0.02  # relative: a code or two next to what they were


def wire_records(engine, groups) -> list[dict[str, torch.Tensor]]:
    """The wire records of a sequence, as they are in the arena."""
    plan = engine.plan("raw")
    return [
        StateRecords(engine.arena, group.sent).views(state.wire)
        for group, state in zip(plan.states, groups[len(plan.paged) :], strict=True)
    ]


def exact_states(engine, groups) -> list[torch.Tensor]:
    """The recurrent states of a sequence, as steps see them."""
    plan = engine.plan("raw")
    return [
        StateRecords(engine.arena, group.page).views(state.side)["recurrent0"].clone()
        for group, state in zip(plan.states, groups[len(plan.paged) :], strict=True)
    ]


def prefilled(runner, form, prompt, budget=64):
    """An engine that holds a prompt for another worker, and what it offered."""
    engine = make_engine(runner, form, max_batch_tokens=budget)
    engine.arena.fill_(0xFF)
    notes = Notes()
    engine.submit(Prefill(request("a", prompt, "raw", 4), handoff=notes))
    for _ in range(-(-len(prompt) // budget)):
        engine.step()
    return engine, notes


@pytest.fixture
def own_runner(hybrid):
    """A hybrid model of its own: recordings stay with a runner."""
    return Runner.load(str(hybrid("granitemoehybrid").info.path))


# -- the worker that computes the prompt


@pytest.mark.parametrize("form", [BF16, INT8])
def test_the_wire_record_is_offered_in_place_of_the_state(form, hybrid):
    _, notes = prefilled(hybrid("qwen3_5_text"), form, random_prompt(40))

    kinds = [item.kind for item in notes.items]
    assert kinds.count(Kind.WIRE) == 3
    assert Kind.SIDE not in kinds


def test_prompts_in_one_chunk_or_in_several_have_the_same_wire_records(hybrid):
    records = []
    for budget in (64, 16):
        engine, notes = prefilled(
            hybrid("qwen3_5_text"), INT8, random_prompt(40), budget
        )
        records.append(wire_records(engine, notes.groups))

    for whole, chunked in zip(*records, strict=True):
        codes = [x["recurrent0"].int() for x in (whole, chunked)]
        assert (codes[0] - codes[1]).abs().max() <= 1
        assert relative_error(chunked["conv0"], whole["conv0"]) < STEP


def test_a_prompt_that_is_held_keeps_wire_records_alone(hybrid):
    engine, notes = prefilled(hybrid("qwen3_5_text"), INT8, random_prompt(40))
    plan = engine.plan("raw")

    assert engine.pool.used_bytes == plan.nbytes(40) - plan.state_bytes
    assert {state.side for state in notes.groups[len(plan.paged) :]} == {None}


# -- the worker that decodes


@pytest.mark.parametrize(
    ("kind", "form"), [("qwen3_5_text", BF16), ("granitemoehybrid", INT8)]
)
def test_an_answer_does_not_depend_on_where_its_prompt_was_computed(kind, form, hybrid):
    runner = hybrid(kind)
    prompt = random_prompt(70)
    (expected,) = serve(make_engine(runner, form), [prompt], "raw", 12)

    llm = LLM(str(runner.info.path), codec="raw", state=form)
    (completion,) = llm.generate([prompt], GREEDY)

    assert list(completion.tokens) == expected
    assert completion.kv.wire_state_bytes < completion.kv.state_bytes
    llm._decode.step()
    assert llm._decode.pool.referenced_pages == 0


def test_the_state_that_decodes_is_the_rounded_one(hybrid):
    """In fp32, and near the exact one: nothing else of the prompt was rounded."""
    runner = hybrid("granitemoehybrid")
    states = {}
    for form in (EXACT, INT8):
        engine = make_engine(runner, form)
        engine.submit(Prefill(request("a", random_prompt(40), "raw", 4)))
        engine.step()
        states[form] = exact_states(engine, engine._scheduler.find("a").groups)

    for rounded, exact in zip(states[INT8], states[EXACT], strict=True):
        assert 0 < relative_error(rounded, exact) < STEP


def test_wire_records_are_freed_before_the_first_step(hybrid):
    engine = make_engine(hybrid("qwen3_5_text"), INT8)
    engine.submit(Prefill(request("a", random_prompt(40), "raw", 4)))

    engine.step()

    assert engine.pool.used_bytes == engine.plan("raw").resident_bytes(40)
    run_until_idle(engine)


def test_recorded_steps_go_on_from_rounded_states(own_runner):
    prompts = {str(n): random_prompt(n) for n in (5, 23, 40)}
    codecs = dict.fromkeys(prompts, "raw")
    expected = forced_logits(own_runner, prompts, codecs, 8, state=INT8)

    replayed = recorded_logits(own_runner, prompts, codecs, 8, state=INT8)

    for rid, logits in expected.items():
        assert relative_error(replayed[rid], logits) < 1e-4


def admission(engine, prompt, source) -> Admit:
    """A prompt that another engine computed, as it is admitted to this one."""
    plan = engine.plan("raw")
    groups = tuple(allocate_group(x, len(prompt), engine.pool) for x in plan.groups)
    sender, notes = source
    for group, own, sent in zip(plan.groups, groups, notes.groups, strict=True):
        own_ids, sent_ids = own.ids_by_kind(), sent.ids_by_kind()
        for kind, pages in sent_ids.items():
            nbytes = group.record(group.layout(kind)).nbytes
            for page, own_page in zip(pages, own_ids[kind], strict=True):
                data = bytes(sender.pool.arena.read(page * ARENA_UNIT, nbytes))
                engine.pool.arena.write([(own_page * ARENA_UNIT, data)])
    (first_token,) = sender._scheduler.find("a").emitted
    return Admit(request("a", prompt, "raw", 12), groups, (first_token,))


@pytest.mark.parametrize("steps", [0, 5])
def test_a_sequence_that_is_preempted_rounds_its_states_again(steps, hybrid):
    """Before its first step or later: the answer is the same."""
    runner = hybrid("qwen3_5_text")
    prompt = random_prompt(70)
    (expected,) = serve(make_engine(runner, INT8), [prompt], "raw", 12)
    engine = make_engine(runner, INT8)
    engine.submit(admission(engine, prompt, prefilled(runner, INT8, prompt, 128)))
    engine._handle(engine._inbox.get())
    before = joined([engine.step() for _ in range(steps)])

    victim = engine._scheduler.preempt()
    engine._on_preempted(victim)

    assert engine.pool.referenced_pages == 0
    after = run_until_idle(engine)
    tokens = {token.index: token.token for token in before.tokens + after.tokens}
    assert [tokens[index] for index in range(12)] == expected


def test_an_admission_that_fails_keeps_no_record(hybrid, monkeypatch):
    runner = hybrid("qwen3_5_text")
    prompt = random_prompt(40)
    engine = make_engine(runner, INT8)
    engine.submit(admission(engine, prompt, prefilled(runner, INT8, prompt)))

    def fails(sequence, arena):
        widen_states(sequence, arena)
        raise MemoryError("no memory")

    monkeypatch.setattr("disagg.engine.engine.widen_states", fails)

    output = engine.step()

    assert [x.rid for x in output.failed] == ["a"]
    assert engine.idle


def test_a_prompt_that_is_aborted_half_way_frees_both_records(hybrid):
    engine = make_engine(hybrid("qwen3_5_text"), INT8, max_batch_tokens=16)
    engine.submit(Prefill(request("a", random_prompt(40), "raw", 4), handoff=Nowhere()))
    engine.step()

    engine.submit(Abort("a"))
    engine.step()

    assert engine.idle
    assert engine.pool.referenced_pages == 0
