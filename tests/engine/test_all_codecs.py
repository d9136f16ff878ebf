"""Every codec serves, alone and beside the others in one step.

What is compared are logits of the same tokens. In another batch a matrix product rounds in another
order, by 1e-7; a codec may then round a number the other way, to the next code of its group.
"""

from itertools import pairwise

import pytest

from disagg.codecs import codec_names
from disagg.engine.messages import Replay
from tests.engine.forced import forced_logits
from tests.engine.serving import answers, make_engine, request, run_until_idle
from tests.model.tiny import random_prompt
from tests.synthetic import relative_error

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


def allowed(codec: str) -> float:
    """Relative, over a whole answer: rounding alone, or with some codes next to what they were.

    Noise also turns the eigenvectors that DecoQuant rotates by, where they are nearly equal.
    """
    return {"raw": 1e-4, "decoquant": 0.1}.get(codec, 0.02)


def test_eight_sequences_with_eight_codecs_decode_in_one_step(runner):
    engine = make_engine(runner)
    for codec in EIGHT:
        engine.submit(Replay(request(codec, random_prompt(200), codec, 100)))
    outputs = run_until_idle(engine)
    assert max(len(output.tokens) for output in outputs) == len(EIGHT)
    assert {codec: len(answer) for codec, answer in answers(outputs).items()} == dict.fromkeys(
        EIGHT, 100
    )


def test_a_codec_computes_beside_seven_others_what_it_computes_alone(runner):
    prompts = dict.fromkeys(EIGHT, random_prompt(200))
    together = forced_logits(runner, prompts, {x: x for x in EIGHT}, 100)
    for codec in EIGHT:
        alone = forced_logits(runner, {codec: prompts[codec]}, {codec: codec}, 100)
        assert relative_error(together[codec], alone[codec]) <= allowed(codec)


@pytest.mark.parametrize("codec", codec_names())
def test_what_any_codec_computes_does_not_depend_on_batch_or_chunks(runner, codec):
    prompts = {str(n): random_prompt(n) for n in (1, 58, 300)}
    codecs = dict.fromkeys(prompts, codec)
    together = forced_logits(runner, prompts, codecs, 16, max_batch_tokens=53)
    for rid, prompt in prompts.items():
        alone = forced_logits(runner, {rid: prompt}, codecs, 16)
        assert relative_error(together[rid], alone[rid]) <= allowed(codec)


def test_the_tolerance_tells_one_codec_from_another(runner):
    """Also from itself with one token of the prompt changed."""
    prompt = random_prompt(200)
    changed = {"same": prompt, "token": [*prompt[:40], (prompt[40] + 1) % 250, *prompt[41:]]}
    for codec in EIGHT:
        seen = forced_logits(runner, changed, dict.fromkeys(changed, codec), 16)
        assert relative_error(seen["token"], seen["same"]) > 2 * allowed(codec)
    each = forced_logits(runner, dict.fromkeys(EIGHT, prompt), {x: x for x in EIGHT}, 16)
    for first, second in pairwise(each[codec] for codec in EIGHT if codec != "alignedkv"):
        assert relative_error(first, second) > 2 * allowed("kivi")
