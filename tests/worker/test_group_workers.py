"""Workers that are groups of ranks, of any number on either side, on real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.codecs.registry import codec_names
from disagg.config import Config, load_config
from disagg.engine.sequence import SamplingParams
from disagg.llm import LLM
from disagg.transfer.messages import Role
from tests.model.tiny import random_prompt, save_tiny
from tests.worker.pairs import House, house

LENGTHS = (17, 130, 200)
TOKENS = 20
SHAPES = [(1, 2), (2, 1), (2, 2)]  # ranks of the prefill and of the decode worker


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that 4 ranks can share."""
    folder = tmp_path_factory.mktemp("four-heads")
    return save_tiny("llama", folder, num_key_value_heads=4)


def config_of(path: Path, senders: int, receivers: int, **settings: object) -> Config:
    flags = {
        "model.name": str(path),
        "cluster.prefill_ranks": senders,
        "cluster.decode_ranks": receivers,
        "cluster.rank_timeout_s": 60.0,
        "engine.arena_bytes": 32 << 20,
        "engine.torch_threads": 1,
        "transfer.min_disagg_tokens": 0,
    }
    return load_config(None, flags | settings)


@asynccontextmanager
async def group_pair(
    path: Path, senders: int, receivers: int, **settings: object
) -> AsyncIterator[House]:
    """A prefill worker "p" and a decode worker "d"; at the end nobody holds anything."""
    async with house(config_of(path, senders, receivers, **settings)) as home:
        home.add("p", Role.PREFILL)
        home.add("d", Role.DECODE)
        yield home
        await home.empty()


def answers_alone(path: Path, codec: str, **sampling: float) -> list[list[int]]:
    """What one process says."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **sampling)
    prompts = [random_prompt(n) for n in LENGTHS]
    completions = LLM(str(path), codec=codec).generate(prompts, params)
    return [list(x.tokens) for x in completions]


async def answers_of(home: House, codec: str, **sampling: float) -> list[list[int]]:
    """What the workers say to the same prompts at the same time."""
    params = {"max_tokens": TOKENS, "ignore_eos": True, **sampling}
    asked = [home.complete(random_prompt(n), codec, **params) for n in LENGTHS]
    return [tokens for tokens, _ in await asyncio.gather(*asked)]


@pytest.mark.slow
@pytest.mark.parametrize(("senders", "receivers"), SHAPES)
async def test_groups_hand_over_every_codec(tiny, senders, receivers):
    async with group_pair(tiny, senders, receivers) as home:
        for codec in codec_names():
            answered = await answers_of(home, codec)

            assert answered == answers_alone(tiny, codec), codec


@pytest.mark.slow
@pytest.mark.parametrize(("senders", "receivers"), SHAPES)
async def test_groups_hand_over_sampled_answers(tiny, senders, receivers):
    sampling = {"temperature": 1.0, "seed": 5}
    async with group_pair(tiny, senders, receivers) as home:
        answered = await answers_of(home, "kivi", **sampling)

    assert answered == answers_alone(tiny, "kivi", **sampling)
