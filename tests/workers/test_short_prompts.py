"""Prompts too short to be worth a hand-off are answered where they decode."""

import asyncio

import pytest

from disagg.config import Config
from disagg.engine.sequence import SamplingParams
from disagg.llm import LLM
from disagg.model.runner import Runner
from disagg.transfer.records import least_worth_sending
from disagg.workers.dispatch import Role
from tests.workers.pairs import Prompt, house

KIVI = "kivi:bits=4,group=64,residual=64"


@pytest.mark.parametrize("codec", [KIVI, "kivi:bits=2", "gear", "0:int8;1-:fp8"])
def test_nothing_larger_than_its_fp16_is_sent(codec: str, story: Prompt) -> None:
    llm = LLM(codec=codec)
    least = least_worth_sending(llm._decode.plan(codec))
    assert 0 < least <= 192
    prompts = [
        (story * 2)[number : number + least + more] for number, more in enumerate((0, 15, 63))
    ]
    for completion in llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True)):
        assert completion.kv.wire_bytes <= completion.kv.fp16_bytes


def test_a_codec_that_does_not_compress_keeps_no_prompt_back() -> None:
    llm = LLM()
    assert least_worth_sending(llm._decode.plan("raw")) == 0


def test_by_default_short_prompts_never_leave_the_decode_worker(
    runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        async with house(Config(codec=KIVI), min_tokens=None) as home:
            home.pair(runners)
            short, long = story[:127], story[:128]
            (tokens, stayed), (_, sent) = [
                await home.complete(prompt, "") for prompt in (short, long)
            ]
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            assert tokens == list(LLM(codec=KIVI).generate([short], params)[0].tokens)
            assert stayed.kv["wire_bytes"] == 0 < sent.kv["wire_bytes"] < sent.kv["fp16_bytes"]
            counts = (await home.router.status())["d"].info["counts"]
            assert counts["computed_tokens"] == 127
            await home.empty()

    asyncio.run(scene())


def test_a_worker_that_does_both_hands_nothing_over_and_computes_no_beginning_twice(
    runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        async with house() as home:
            home.add("b", Role.BOTH, runners[0])
            (first, one), (second, two) = [await home.complete(story, KIVI) for _ in range(2)]
            assert first == second
            assert one.kv["wire_bytes"] == two.kv["wire_bytes"] == one.kv["cached_tokens"] == 0
            assert two.kv["cached_tokens"] > len(story) - 17
            await home.empty()

    asyncio.run(scene())
