"""Hybrid models over real gRPC: hand-off, moves, death of a worker."""

import asyncio
from dataclasses import replace

import pytest

from disagg.codecs.planning import parse_plan
from disagg.config import Config, EngineConfig
from disagg.errors import LayoutError
from disagg.model.runner import Runner
from disagg.transfer.messages import Role
from disagg.transfer.records import Manifest
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_tiny
from tests.worker.pairs import house, paired

ANSWER, HEARD = 120, 20  # tokens of an answer that moves, and of them before it does
DELTA, MAMBA = "qwen3_5_text", "granitemoehybrid"  # the delta rule, Mamba 2


@pytest.fixture(scope="module", params=[DELTA, MAMBA])
def hybrids(request, tmp_path_factory) -> list[Runner]:
    """A small random model three times: an engine has a model of its own."""
    folder = save_tiny(request.param, tmp_path_factory.mktemp("hybrid"), head_dim=64)
    return [Runner.load(str(folder)) for _ in range(3)]


async def test_a_crowd_has_the_answers_of_generate(hybrids):
    """Prompts in chunks beside rows that decode, handed off under raw pages."""
    reference = ReferenceModel(str(hybrids[0].info.path))
    prompts = [tuple(random_prompt(n)) for n in (5, 23, 70, 111, 150)]
    config = Config(engine=EngineConfig(max_batch_tokens=32))
    async with paired(hybrids, config) as home:
        asking = [home.complete(prompt, "raw", max_tokens=24) for prompt in prompts]
        answers = await asyncio.gather(*asking)

    for prompt, (tokens, _) in zip(prompts, answers, strict=True):
        assert tokens == list(reference.generate(list(prompt), 24).tokens)


async def test_sampled_answers_of_a_crowd_are_those_of_one_client(hybrids):
    prompts = [tuple(random_prompt(n)) for n in (23, 70, 150)]
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_tokens": 24}
    async with paired(hybrids) as home:
        alone = [(await home.complete(x, "raw", **sampling))[0] for x in prompts]
        asking = [home.complete(prompt, "raw", **sampling) for prompt in prompts]
        crowd = await asyncio.gather(*asking)

    assert [tokens for tokens, _ in crowd] == alone


async def test_workers_count_the_bytes_that_the_manifest_says(hybrids):
    prompt = tuple(random_prompt(150))
    async with paired(hybrids) as home:
        _, ended = await home.complete(prompt, "raw")

    manifest = Manifest(parse_plan("raw", hybrids[0].shape), len(prompt))
    assert ended.kv["payload_bytes"] == manifest.total_bytes


async def test_a_running_sequence_moves_with_its_states(hybrids):
    codec = "kivi:bits=2,residual=64"
    prompt = tuple(random_prompt(150))
    async with paired(hybrids) as home:
        expected, _ = await home.complete(prompt, codec, max_tokens=ANSWER)
        asking = await home.begin_to_move(prompt, codec, HEARD, ANSWER)
        leaving = await home.relieve(hybrids[2])

        tokens, _ = await asking

        assert tokens == expected
        assert leaving.service.decode.counts["moved"] == 1
        assert home.router.table.retries == 0


async def test_a_killed_worker_loses_states_and_no_token(hybrids):
    prompt = tuple(random_prompt(150))
    async with paired(hybrids) as home:
        expected, _ = await home.complete(prompt, "raw", max_tokens=ANSWER)
        asking = await home.begin(prompt, "raw", HEARD, ANSWER)
        home.add("d2", Role.DECODE, hybrids[2])
        await home.kill("d")

        tokens, _ = await asking

        assert tokens == expected


async def test_a_known_prefix_is_not_sent_again_and_its_states_are(hybrids):
    prompt = tuple(random_prompt(150))
    async with paired(hybrids) as home:
        first, ended = await home.complete(prompt, "raw")
        second, ended_again = await home.complete(prompt, "raw")

        assert second == first
        state_bytes = hybrids[0].shape.state_bytes
        assert ended.kv["state_bytes"] == ended_again.kv["state_bytes"] == state_bytes
        assert ended.kv["payload_bytes"] > ended_again.kv["payload_bytes"]
        assert ended_again.kv["payload_bytes"] >= state_bytes
        assert ended_again.kv["cached_bytes"] > 0


# -- states that are rounded for their hand-off

ROUNDED = Config(state="int8")


@pytest.mark.parametrize("hybrids", [DELTA], indirect=True)
async def test_a_sequence_moves_with_its_states_as_they_are(hybrids):
    """Rounded again, they would change the answer."""
    prompt = tuple(random_prompt(150))
    async with paired(hybrids, ROUNDED) as home:
        expected, ended = await home.complete(prompt, "raw", max_tokens=ANSWER)
        asking = await home.begin_to_move(prompt, "raw", HEARD, ANSWER)
        leaving = await home.relieve(hybrids[2])

        tokens, _ = await asking

        assert tokens == expected
        moved_bytes = leaving.service.decode.counts["moved_bytes"]
        assert moved_bytes > ended.kv["state_bytes"] > ended.kv["wire_state_bytes"] > 0


@pytest.mark.parametrize("hybrids", [DELTA], indirect=True)
async def test_a_worker_tells_the_bytes_of_states_as_they_are_sent(hybrids):
    """A router reckons with them how long a link takes."""
    async with paired(hybrids, ROUNDED) as home:
        info = home.workers["d"].info
    (codec,) = info.wire_sizes
    shape = replace(hybrids[0].shape, state_form="int8")
    plan = parse_plan(codec, shape)

    assert info.wire_bytes_of(codec, 1024) == Manifest(plan, 1024).total_bytes
    saved = plan.state_bytes - plan.wire_state_bytes
    assert info.bytes_of(codec, 1024) >= info.wire_bytes_of(codec, 1024) + saved > 0


@pytest.mark.parametrize("hybrids", [MAMBA], indirect=True)
async def test_a_replay_after_a_death_rounds_the_states_alike(hybrids):
    prompt = tuple(random_prompt(150))
    async with paired(hybrids, ROUNDED) as home:
        expected, _ = await home.complete(prompt, "raw", max_tokens=ANSWER)
        asking = await home.begin(prompt, "raw", HEARD, ANSWER)
        home.add("d2", Role.DECODE, hybrids[2])
        await home.kill("d")

        tokens, _ = await asking

        assert tokens == expected


@pytest.mark.parametrize("hybrids", [DELTA], indirect=True)
async def test_workers_that_round_states_otherwise_are_refused(hybrids):
    async with house(ROUNDED) as home:
        home.add("p", Role.PREFILL, hybrids[0])
        home.config = replace(home.config, state="bf16")
        home.add("d", Role.DECODE, hybrids[1])

        with pytest.raises(LayoutError, match="same release, model and settings"):
            await home.complete(tuple(random_prompt(150)), "raw")


async def test_a_prompt_that_comes_again_goes_where_its_states_are(hybrids):
    prompt = tuple(random_prompt(150))
    async with paired(hybrids) as home:
        home.add("p2", Role.PREFILL, hybrids[2])
        first, ended = await home.complete(prompt, "raw")
        second, ended_again = await home.complete(prompt, "raw")

        assert second == first
        assert ended.kv["cached_tokens"] == 0
        assert ended_again.kv["cached_tokens"] == 128
