"""What a worker refuses, by name, and what it asks again: real gRPC, nothing is left."""

import asyncio
import math
from functools import reduce
from types import SimpleNamespace

import pytest

from disagg import errors
from disagg.config import Config, EngineConfig
from disagg.engine.messages import Abort, Token
from disagg.kv.plan import Plan
from disagg.llm import LLM
from disagg.transfer.messages import Job, Role, Submit, Work
from disagg.transfer.reservations import Admission
from disagg.wire import Commit, Ticket
from disagg.worker.decode import LOCAL, DecodeSide
from disagg.worker.event_log import EventLog
from disagg.worker.worker import Worker
from tests.worker.pairs import KIVI, paired


@pytest.mark.parametrize(
    ("codec", "error"),
    [
        ("kivy", errors.ConfigError),
        ("kivi:bits=3", errors.ConfigError),
        ("0:raw", errors.ConfigError),
        ("²-:raw", errors.ConfigError),
        ("\ud800", errors.DisaggError),
    ],
    ids=["name", "value", "plan", "digit", "half-a-character"],
)
async def test_a_codec_that_cannot_be_is_refused_by_name(codec, error, home, story):
    with pytest.raises(error):
        await home.complete(story, codec)


async def test_a_bug_in_a_prefill_worker_ends_the_request_at_once(
    runners, story, caplog
):
    async with paired(runners, deadline_s=1e6) as home:
        engine = home.workers["p"].engine
        plans = engine.plan

        def plan(spec: str) -> Plan:
            if spec == "raw":
                raise ValueError(f"nobody foresaw {spec}")
            return plans(spec)

        engine.plan = plan
        with pytest.raises(errors.DisaggError, match="ValueError: nobody foresaw raw"):
            await home.complete(story, "raw")
        assert home.workers["p"].service.prefill.failures["internal"] >= 1
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ((1,) * 5000, {}, errors.PromptTooLongError, None),
        ((10**6,), {}, errors.RequestError, None),
        ((1, 2), {"top_p": 0.0}, errors.RequestError, None),
        ((1, 2), {"beams": 4}, errors.RequestError, None),
        ((1, 2), {"top_k": 2**64}, errors.RequestError, "top_k"),
        ((1, 2), {"max_tokens": 2**64}, errors.RequestError, "max_tokens"),
        ((1, 2), {"seed": 2**64}, errors.RequestError, "seed"),
    ],
    ids=[
        "too-long",
        "no-such-token",
        "no-such-value",
        "no-such-sampling",
        "top-k",
        "max",
        "seed",
    ],
)
async def test_a_request_that_cannot_be_is_refused_by_name(
    prompt, params, error, words, home
):
    with pytest.raises(error, match=words):
        await home.complete(prompt, KIVI, **params)


def test_an_arena_that_holds_no_prompt_of_a_listed_codec_is_refused_at_the_start(
    runners,
):
    config = Config("raw", [KIVI], engine=EngineConfig(arena_bytes=1 << 20))
    with pytest.raises(
        errors.ConfigError, match=f"arena_bytes is {1 << 20}; kivi.* {2 << 20}$"
    ):
        Worker(config, Role.DECODE, "w", runner=runners[0])
    with pytest.raises(
        errors.ConfigError, match=f"arena_bytes is {1 << 20}; kivi.* {2 << 20}$"
    ):
        LLM(codec=KIVI, config=config.engine)


async def test_prompts_wait_for_room_at_the_decode_worker(runners, story):
    """Four prompts for a decode worker that holds one or two at a time: all are answered."""
    small = EngineConfig(arena_bytes=4 << 20, watermark=0.0)
    async with paired(runners, Config(engine=small)) as home:
        answers = await asyncio.gather(
            *(home.complete(story * 3, KIVI) for _ in range(4))
        )
        assert len({tuple(tokens) for tokens, _ in answers}) == 1


async def test_another_model_is_refused_by_its_fingerprint(runners, story, monkeypatch):
    monkeypatch.setattr(runners[1], "fingerprint", "another")
    async with paired(runners) as home:
        with pytest.raises(errors.LayoutError, match="model"):
            await home.complete(story, KIVI)


async def test_a_decode_worker_takes_no_prompts_and_a_stale_epoch_no_work(home):
    prefill = home.workers["p"].service
    decode = home.workers["d"].service
    job = Job("r", 1, (1, 2))
    with pytest.raises(errors.PeerLostError, match="decode"):
        await decode.submit(Submit(job, Work.PREFILL, decode.epoch))
    with pytest.raises(errors.PeerLostError, match="prefill"):
        await prefill.reserve(job, prefill.epoch)
    with pytest.raises(errors.ReservationError, match="epoch"):
        await prefill.submit(Submit(job, Work.PREFILL, prefill.epoch - 1))
    with pytest.raises(errors.ReservationError, match="epoch"):
        await decode.reserve(job, decode.epoch + 1)


DEEP = reduce(lambda inner, _: [inner], range(1000), [])
EMITTED = [7, "7", 7], [7, True, 7], [7, 7.5, 7], [7, 1 << 40, 7], [7, DEEP, 7], 7
SCORES = [math.nan, []], [b"-1", []], [-1.0, [[-7, -1.0]]], [-1.0, [[7, None]]], -1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("emitted", x) for x in EMITTED), *(("logprobs", [x]) for x in SCORES)],
)
def test_what_a_commit_carries_along_is_of_its_kind_or_refused(name, value):
    side = DecodeSide(None, None, EventLog(), on_done=None)
    job = Job("r", 1, (1, 2), moved=4 if name == "emitted" else 0)
    with pytest.raises(errors.CorruptFrameError, match=name):
        side.admit(
            Admission(job, (), Commit(Ticket(0, 0, 0), 2, "", (), 7, {name: value}))
        )
    assert not side.events.num_requests
    assert not side.attempts


def test_an_output_that_breaks_ends_its_sequence_alone():
    aborts: list[Abort] = []
    engine = SimpleNamespace(submit=aborts.append, plan=lambda codec: 1 / 0)
    context = SimpleNamespace(engine=engine)
    side = DecodeSide(context, None, EventLog(), on_done=lambda rid, attempt: None)
    bad, good = f"bad{LOCAL}", "good"
    side._jobs = {name: Job(name, 1, (1, 2)) for name in (bad, good)}

    events = side.step([Token(name, 0, 7, None) for name in (bad, good)])

    assert [(x.rid, x.token, x.error is None) for x in events] == [
        (bad, None, False),
        (good, 7, True),
    ]
    assert aborts == [Abort(bad)]
    assert side.attempts == {(good, 1)}
