"""Random requests have the answers of one engine without drafts, whatever happens to workers."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.config import Config, EngineConfig
from disagg.engine.sequence import Request
from disagg.model.runner import Runner
from disagg.router import moves
from disagg.transfer.messages import Role
from tests.engine.scripted import RandomRequests, ScriptedRunner, StepEntries
from tests.engine.serving import make_engine
from tests.engine.test_lookup_fuzz import never, serve_all
from tests.transfer.peer import until
from tests.worker.pairs import House, collect, paired

CODECS = ["raw", "kivi:bits=2,group=64,residual=64", "banded", "pertoken:bits=4"]
DRAFTING = Config(
    engine=EngineConfig(arena_bytes=32 << 20, max_sequences=4, speculative_tokens=5)
)

Ends = list[tuple[list[int], str | None]]  # tokens and reason of each answer


@pytest.fixture(scope="module")
def tiny_runners(tiny: Path) -> list[Runner]:
    return [Runner.load(str(tiny)) for _ in range(3)]


@pytest.fixture
def entries(monkeypatch) -> StepEntries:
    monkeypatch.setattr(moves, "MOVE_TOKENS", 1)
    return StepEntries(monkeypatch)


def random_requests(
    seed: int, count: int, runner: ScriptedRunner
) -> tuple[list[Request], Ends]:
    """Requests with predictions, and their answers without drafts."""
    draw = RandomRequests(seed, CODECS, most_tokens=200)
    requests = [draw.next(f"{seed}-{i}") for i in range(count)]
    answers = serve_all(make_engine(runner), requests, never)
    words = {rid: [x.token for x in answer] for rid, answer in answers.items()}
    expected = [(words[x.rid], answers[x.rid][-1].finish_reason) for x in requests]
    predicting = [
        replace(x, prediction=draw.prediction(words[x.rid])) for x in requests
    ]
    return predicting, expected


async def ask(home: House, request: Request, tokens: list[int]) -> str | None:
    """Read the tokens of an answer; why it ends."""
    outputs = home.router.generate(
        request.tokens,
        vars(request.params),
        request.codec,
        prediction=request.prediction,
    )
    _, end = await collect(outputs, tokens)
    return end.finish_reason


async def begin(
    home: House, requests: Sequence[Request]
) -> tuple[list[list[int]], "asyncio.Future[list[str | None]]"]:
    """All requests at once; returns when a few tokens have come."""
    tokens: list[list[int]] = [[] for _ in requests]
    asking = asyncio.gather(*map(ask, [home] * len(requests), requests, tokens))
    await until(lambda: sum(map(len, tokens)) >= 3 * len(tokens) or asking.done())
    return tokens, asking


async def check_seed(
    seed: int, count: int, tiny_runners: list[Runner], entries: StepEntries
) -> int:
    """One decode worker leaves in the middle of the answers, and one dies; how many moved."""
    runners = [ScriptedRunner(runner, entries) for runner in tiny_runners]
    requests, expected = random_requests(seed, count, runners[0])
    async with paired(runners, DRAFTING) as home:
        tokens, asking = await begin(home, requests)
        leaving = await home.relieve(runners[2])
        home.add("d3", Role.DECODE, runners[1])
        await home.kill("d2")
        reasons = await asking

    assert list(zip(tokens, reasons, strict=True)) == expected
    assert leaving.engine.counts["accepted_tokens"]
    assert home.router.table.retries
    return leaving.service.decode.counts["moved"]


async def test_answers_survive_moves_and_a_death_as_without_drafts(
    tiny_runners, entries
):
    await check_seed(0, 5, tiny_runners, entries)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_many_answers_survive_moves_and_deaths(tiny_runners, entries):
    moved = [await check_seed(seed, 16, tiny_runners, entries) for seed in range(1, 13)]

    assert sum(moved) > 10
