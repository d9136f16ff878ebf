"""Prompts too short to be worth a hand-off are answered where they decode."""

import pytest

from disagg.config import Config
from disagg.engine.sequence import SamplingParams
from disagg.llm import LLM
from disagg.transfer.records import least_worth_sending
from tests.workers.pairs import alone, paired

KIVI = "kivi:bits=4,group=64,residual=64"


@pytest.mark.parametrize("codec", [KIVI, "kivi:bits=2", "gear", "0:int8;1-:fp8"])
def test_nothing_larger_than_its_fp16_is_sent(codec, story):
    llm = LLM(codec=codec)
    least = least_worth_sending(llm._decode.plan(codec))
    assert 0 < least <= 192
    prompts = [
        (story * 2)[number : number + least + more] for number, more in enumerate((0, 15, 63))
    ]
    for completion in llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True)):
        assert completion.kv.wire_bytes <= completion.kv.fp16_bytes


def test_a_codec_that_does_not_compress_keeps_no_prompt_back():
    assert least_worth_sending(LLM()._decode.plan("raw")) == 0


async def test_by_default_short_prompts_never_leave_the_decode_worker(runners, story):
    async with paired(runners, Config(codec=KIVI), min_tokens=None) as home:
        tokens, stayed = await home.complete(story[:127], "")
        _, sent = await home.complete(story[:128], "")
        assert tokens == alone(story[:127], KIVI)
        assert stayed.kv["wire_bytes"] == 0 < sent.kv["wire_bytes"] < sent.kv["fp16_bytes"]
        counts = (await home.router.status())["d"].info["counts"]
        assert counts["computed_tokens"] == 127
