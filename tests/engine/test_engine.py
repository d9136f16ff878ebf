"""The loop: what it answers, whatever it was fed together and in whatever pieces."""

from copy import copy
from dataclasses import replace
from itertools import chain, cycle
from typing import Any

import pytest
import torch

from disagg.engine import engine as engine_module
from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Admit, Prefill, Prefilled
from disagg.kernels.cpu import library
from disagg.kv.page import Item, Kind
from disagg.kv.state import allocate_group
from disagg.model.attention import Batch
from disagg.model.runner import Runner
from tests.engine.forced import allowed, collect, forced_logits, make_forced, token_at
from tests.engine.margins import TIE, assert_same, serve_watched
from tests.engine.serving import (
    Nowhere,
    answers,
    make_engine,
    request,
    run_until_idle,
    serve,
)
from tests.model.reference import ReferenceModel
from tests.model.tiny import CONTEXT, random_prompt
from tests.synthetic import relative_error

KIVI = "kivi:bits=2,group=64,residual=64"
MIXED = "0:kivi:bits=4,group=32,residual=32;1-:kivi:bits=2,group=64,residual=16"
LENGTHS = (1, 63, 64, 130, 300)


class Recorder(Nowhere):
    """A hand-off that goes nowhere, and notes what it was told."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def begin(self, plan: Any, groups: Any) -> None:
        super().begin(plan, groups)
        self.events.append("begin")

    def offer(self, items: list[Item]) -> None:
        self.events.append(items)


def prefilled(engine: Engine) -> Prefilled:
    """What an engine says of the only prompt that it has."""
    while not (output := engine.step()).prefilled:
        pass
    return output.prefilled[0]


def test_a_ragged_batch_answers_as_unbatched_generate_does(runner):
    prompts = [random_prompt(n) for n in LENGTHS]
    reference = ReferenceModel(str(runner.info.path))
    together, alone = (
        serve(make_engine(runner), prompts, "raw", 40),
        make_engine(runner),
    )
    for prompt, answer in zip(prompts, together, strict=True):
        expected = reference.generate(prompt, 40)
        assert_same(answer, expected)
        assert_same(serve(alone, [prompt], "raw", 40)[0], expected)


@pytest.mark.parametrize("codec", [KIVI, MIXED, "raw"])
@pytest.mark.parametrize("num_emitted", [1, 90])
def test_a_replay_goes_on_as_if_nothing_had_happened(runner, codec, num_emitted):
    whole = forced_logits(runner, {"a": random_prompt(100)}, {"a": codec}, 140)["a"]
    engine, forced = make_forced(runner)
    emitted = [token_at(99 + index) for index in range(num_emitted)]
    engine.submit(
        Prefill(
            request("again", random_prompt(100), codec, 140), emitted=tuple(emitted)
        )
    )
    first, *tokens = collect(engine, forced)
    assert (first.token.index, first.token.token) == (num_emitted - 1, emitted[-1])
    assert [sampled.token.index for sampled in tokens] == list(range(num_emitted, 140))
    logits = torch.stack([sampled.logits for sampled in tokens])
    assert relative_error(logits, whole[num_emitted:]) <= allowed(codec)


@pytest.mark.parametrize("codec", [KIVI, "raw", "banded"])
def test_an_answer_goes_on_by_another_backend_and_loses_or_repeats_none(
    runner, codec, monkeypatch
):
    """The reference and a path of the C library by turns; an odd number, so that each seals."""
    by_turns = ((path, library.TORCH) for path in library.paths())
    backends, compute = cycle((library.TORCH, *chain(*by_turns))), runner.forward

    def forward(batch: Batch) -> torch.Tensor:
        with library.forced(next(backends)):
            return compute(batch)

    whole = forced_logits(runner, {"a": random_prompt(100)}, {"a": codec}, 140)["a"]
    monkeypatch.setattr(runner, "forward", forward)
    engine, forced = make_forced(runner)
    engine.submit(Prefill(request("a", random_prompt(100), codec, 140)))
    sampled = collect(engine, forced)
    assert [x.token.index for x in sampled] == list(range(140))
    logits = torch.stack([x.logits for x in sampled])
    assert relative_error(logits, whole) <= allowed(codec)


@pytest.mark.parametrize(
    ("codec", "lengths", "tokens", "mib"),
    [
        ("raw", (100, 120, 90, 110), 90, 2),
        ("kivi:bits=2,group=64,residual=128", (100, 120, 90, 110), 90, 2),
        (
            "banded",
            (200, 120, 250, 130),
            140,
            4,
        ),  # pages of the prompt; or the first one decoding
    ],
)
def test_preempted_sequences_lose_nothing(runner, codec, lengths, tokens, mib):
    prompts = {str(i): random_prompt(n) for i, n in enumerate(lengths)}
    expected = forced_logits(runner, prompts, dict.fromkeys(prompts, codec), tokens)
    tight, forced = make_forced(runner, arena_bytes=mib << 20, watermark=0.0)
    for rid, prompt in prompts.items():
        tight.submit(Prefill(request(rid, prompt, codec, tokens)))
    preempted: set[str] = set()
    sampled = collect(tight, forced, preempted)
    assert preempted
    assert "0" not in preempted
    for rid in prompts:
        own = [x for x in sampled if x.token.rid == rid]
        assert [x.token.index for x in own] == list(range(tokens))
        logits = torch.stack([x.logits for x in own])
        assert relative_error(logits, expected[rid]) <= allowed(codec)


def test_an_answer_that_outgrows_an_empty_pool_ends_with_what_it_has(runner):
    prompt = random_prompt(200)
    (expected,) = serve(make_engine(runner), [prompt], "raw", 300)
    engine = make_engine(runner, arena_bytes=1 << 20)
    engine.submit(Prefill(request("big", prompt, "raw", 300, ignore_eos=True)))
    output = run_until_idle(engine)
    assert not output.failed
    *tokens, last = output.tokens
    assert not any(token.finish_reason for token in tokens)
    assert (last.finish_reason, last.index) == ("length", len(tokens) - 1)
    answer = [token.token for token in tokens]
    assert 10 < len(answer) < 300
    assert answer == expected[: len(answer)]
    assert last.token == answer[-1]


def test_who_lies_scattered_over_slabs_starts_again_alone_before_it_is_cut_off(
    runner, monkeypatch
):
    monkeypatch.setattr(engine_module, "slab_bytes_for", lambda *_: 1 << 18)
    engine = make_engine(runner, arena_bytes=4 << 18, watermark=0.0)
    for rid, n in (("0", 340), ("1", 300), ("2", 250)):
        work = request(rid, random_prompt(n), "gear:bits=2", 150, ignore_eos=True)
        engine.submit(Prefill(work))
    tokens = answers(run_until_idle(engine))
    assert [len(answer) for answer in tokens.values()] == [150] * 3
    assert engine.counts["preempted"] < 6  # who finds no room waits for it


def test_prefill_offers_every_item_once_and_holds_the_records(runner):
    engine, handoff, n = make_engine(runner, max_batch_tokens=50), Recorder(), 200
    engine.submit(Prefill(request("a", random_prompt(n), MIXED, 10), handoff))
    done = prefilled(engine)
    plan = engine.plan(MIXED)
    expected = [
        Item(kind, index, layer, record)
        for layer, index in enumerate(plan.group_of)
        for kind in Kind
        for record in range(plan.groups[index].inventory(n)[kind])
    ]
    assert handoff.events[0] == "begin"
    assert sorted(item for items in handoff.events[1:] for item in items) == sorted(
        expected
    )
    assert plan.nbytes(n) == engine.pool.used_bytes
    assert done.encode_ms > 0
    engine.submit(Abort("a"))
    run_until_idle(engine)


@pytest.mark.parametrize("codec", ["raw", KIVI, MIXED])
def test_an_admitted_prompt_goes_on_as_a_local_one(runner, codec):
    prompt = random_prompt(200)
    whole = forced_logits(runner, {"a": prompt}, {"a": codec}, 60)["a"]
    (engine, forced), handoff = make_forced(runner), Recorder()
    engine.submit(Prefill(request("p", prompt, codec, 60), handoff))
    done = prefilled(engine)
    assert done.first_token == token_at(199)
    assert relative_error(forced.logits[0], whole[0]) <= allowed(codec)
    engine.pool.retain([page for state in handoff.groups for page in state.ids()])
    engine.submit(Abort("p"))
    engine.submit(
        Admit(request("d", prompt, codec, 60), handoff.groups, (done.first_token,))
    )
    first, *tokens = collect(engine, forced)
    assert (first.token.index, first.token.token) == (0, done.first_token)
    assert [sampled.token.index for sampled in tokens] == list(range(1, 60))
    logits = torch.stack([sampled.logits for sampled in tokens])
    assert relative_error(logits, whole[1:]) <= allowed(codec)


def test_an_answer_that_ended_with_its_first_token_is_repeated_and_freed(runner):
    engine = make_engine(runner)
    groups = tuple(
        allocate_group(group, 20, engine.pool) for group in engine.plan(KIVI).groups
    )
    engine.submit(Admit(request("d", random_prompt(20), KIVI, 1), groups, (7,)))
    (token,) = run_until_idle(engine).tokens
    assert (token.index, token.token, token.finish_reason) == (0, 7, "length")


def test_an_end_of_text_stops_unless_it_is_ignored(runner):
    prompt = random_prompt(30)
    expected = serve_watched(runner, prompt, "raw", 20)
    assert (
        min(expected.margins) > TIE
    )  # so two of it in one batch say what one alone does
    whole = list(expected.tokens)
    stop = whole[6]
    ends = make_engine(with_eos(runner, stop))
    ends.submit(Prefill(request("stop", prompt, "raw", 20)))
    ends.submit(Prefill(request("on", prompt, "raw", 20, ignore_eos=True)))
    output = run_until_idle(ends)
    last = {x.rid: x for x in output.tokens if x.finish_reason}
    assert last["stop"].index == whole.index(stop)
    assert (last["stop"].finish_reason, last["on"].finish_reason) == ("stop", "length")
    assert answers(output)["on"] == whole


def with_eos(runner: Runner, token: int) -> Runner:
    changed = copy(runner)
    changed.info = replace(runner.info, eos_ids=(token,))
    return changed


def test_an_answer_ends_where_the_context_does(runner):
    prompt = random_prompt(CONTEXT - 3)
    assert len(serve(make_engine(runner), [prompt], KIVI, 100)[0]) == 3


def test_an_aborted_request_leaves_nothing_and_says_no_more(runner):
    engine = make_engine(runner, max_batch_tokens=40, max_sequences=3)
    for rid in ("decodes", "stays"):
        engine.submit(Prefill(request(rid, random_prompt(15), KIVI, 50)))
    engine.submit(
        Prefill(request("prefills", random_prompt(200), KIVI, 50), Recorder())
    )
    engine.submit(Prefill(request("waits", random_prompt(200), KIVI, 50)))
    engine.step()
    assert (engine.load.running, engine.load.waiting) == (3, 1)
    for rid in ("waits", "prefills", "decodes", "nobody"):
        engine.submit(Abort(rid))
    assert {token.rid for token in run_until_idle(engine).tokens} == {"stays"}


def test_an_engine_says_what_it_could_take_now(runner):
    engine = make_engine(runner, arena_bytes=4 << 20, watermark=0.25, max_sequences=3)
    for rid in ("decodes", "holds", "too many", "even more"):
        engine.submit(Prefill(request(rid, random_prompt(100), "raw", 50)))
    engine.step()
    load = engine.load
    assert (load.running, load.waiting, load.slots) == (3, 1, 0)
    assert load.free_bytes == engine.pool.free_bytes - (1 << 20)
    assert not engine.may_reserve()
    for rid in ("holds", "too many"):
        engine.submit(Abort(rid))
    engine.step()
    load = engine.load
    assert (load.running, load.waiting, load.slots) == (2, 0, 1)
    assert engine.may_reserve()
    run_until_idle(engine)
