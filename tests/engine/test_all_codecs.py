"""Every codec serves, alone and beside the others in one step."""

import pytest

from disagg.codecs import codec_names
from disagg.engine.messages import Replay
from disagg.model.runner import Runner
from tests.engine.serving import answers, make_engine, request, run_until_idle, serve
from tests.model.tiny import random_prompt

EIGHT = [
    "raw",
    "kivi:bits=2,group=64,residual=64",
    "pertoken:bits=4",
    "kcvt:bits=4",
    "gear:bits=2,backbone=kivi",
    "ott:skip_layers=0",
    "decoquant",
    "alignedkv",
]


def test_eight_sequences_with_eight_codecs_decode_in_one_step(runner: Runner) -> None:
    prompt, alone, together = random_prompt(200), make_engine(runner), make_engine(runner)
    expected = {codec: serve(alone, [prompt], codec, 100)[0] for codec in EIGHT}
    for codec in EIGHT:
        together.submit(Replay(request(codec, prompt, codec, 100)))
    outputs = run_until_idle(together)
    assert max(len(output.tokens) for output in outputs) == len(EIGHT)
    assert answers(outputs) == expected


@pytest.mark.parametrize("codec", codec_names())
def test_answers_of_any_codec_do_not_depend_on_batch_or_chunks(runner: Runner, codec: str) -> None:
    prompts = [random_prompt(n) for n in (1, 58, 300)]
    alone = make_engine(runner)
    expected = [serve(alone, [prompt], codec, 16)[0] for prompt in prompts]
    assert serve(make_engine(runner, max_batch_tokens=53), prompts, codec, 16) == expected
    assert alone.pool.used_bytes == 0
