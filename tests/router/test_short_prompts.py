"""Prompts too short to be worth a hand-off are answered where they decode."""

import asyncio

import pytest

from disagg.config import Config, EngineConfig
from disagg.engine import engine
from disagg.engine.sequence import SamplingParams
from disagg.llm import LLM
from disagg.transfer.records import least_worth_sending
from tests.worker.pairs import alone, paired

KIVI = "kivi:bits=4,group=64,residual=64"


@pytest.mark.parametrize("codec", [KIVI, "kivi:bits=2", "gear", "0:int8;1-:fp8"])
def test_nothing_larger_than_its_fp16_is_sent(codec, story):
    llm = LLM(codec=codec)
    least = least_worth_sending(llm._decode.plan(codec))
    assert 0 < least <= 192
    cuts = enumerate((0, 15, 63))
    prompts = [(story * 2)[number : number + least + more] for number, more in cuts]
    for completion in llm.generate(
        prompts, SamplingParams(max_tokens=2, ignore_eos=True)
    ):
        assert completion.kv.wire_bytes <= completion.kv.fp16_bytes


def test_a_codec_that_does_not_compress_keeps_no_prompt_back():
    assert least_worth_sending(LLM()._decode.plan("raw")) == 0


async def test_by_default_short_prompts_never_leave_the_decode_worker(runners, story):
    async with paired(runners, Config(codec=KIVI), min_tokens=None) as home:
        tokens, stayed = await home.complete(story[:127], "")
        _, sent = await home.complete(story[:128], "")
        assert tokens == alone(story[:127], KIVI)
        assert (
            stayed.kv["wire_bytes"] == 0 < sent.kv["wire_bytes"] < sent.kv["fp16_bytes"]
        )
        counts = (await home.router.status())["d"].info["counts"]
        assert counts["computed_tokens"] == 127


async def test_whole_and_handed_over_together_they_keep_to_the_rows(
    runners, story, monkeypatch
):
    """More rows than were recorded would be recorded while requests wait."""
    decode_counts, build_batch = [], engine.build_batch

    def count(shares, *rest):
        decode_counts.append(sum(share.decodes for share in shares))
        return build_batch(shares, *rest)

    monkeypatch.setattr(engine, "build_batch", count)
    config = Config(codec=KIVI, engine=EngineConfig(max_sequences=3))
    async with paired(runners, config, min_tokens=None) as home:
        prompts = [story[i : i + (40 if i % 2 else 150)] for i in range(10)]
        answers = [home.complete(each, "", max_tokens=30) for each in prompts]
        for prompt, (tokens, _) in zip(
            prompts, await asyncio.gather(*answers), strict=True
        ):
            assert tokens == alone(prompt, KIVI, max_tokens=30)
        await home.empty()
        assert max(decode_counts) == 3
        assert home.workers["d"].engine.decode_slots.free == 3
