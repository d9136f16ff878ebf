"""Hybrid models over real gRPC: hand-off, moves, death of a worker."""

import pytest

from disagg.model.runner import Runner
from disagg.transfer.messages import Role
from tests.model.tiny import random_prompt, save_tiny
from tests.worker.pairs import paired

ANSWER, HEARD = 120, 20  # tokens of an answer that moves, and of them before it does
KINDS = ["qwen3_5_text", "granitemoehybrid"]  # the delta rule, Mamba 2


@pytest.fixture(scope="module", params=KINDS)
def hybrids(request, tmp_path_factory) -> list[Runner]:
    """A small random model three times: an engine has a model of its own."""
    folder = save_tiny(request.param, tmp_path_factory.mktemp("hybrid"), head_dim=64)
    return [Runner.load(str(folder)) for _ in range(3)]


async def test_a_running_sequence_moves_with_its_states(hybrids):
    codec = "kivi:bits=2,residual=64"
    prompt = tuple(random_prompt(150))
    async with paired(hybrids) as home:
        expected, _ = await home.complete(prompt, codec, max_tokens=ANSWER)
        asking = await home.begin(prompt, codec, HEARD, ANSWER)
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


async def test_a_prompt_that_comes_again_goes_where_its_states_are(hybrids):
    prompt = tuple(random_prompt(150))
    async with paired(hybrids) as home:
        home.add("p2", Role.PREFILL, hybrids[2])
        first, ended = await home.complete(prompt, "raw")
        second, ended_again = await home.complete(prompt, "raw")

        assert second == first
        assert ended.kv["cached_tokens"] == 0
        assert ended_again.kv["cached_tokens"] == 128
