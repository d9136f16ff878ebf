"""Every codec serves, alone and beside the others in one step.

What is compared are logits of the same tokens. In another batch a matrix product rounds in another
order, by 1e-7; a codec may then round a number the other way, to the next code of its group.
"""

from itertools import pairwise

import pytest

from disagg.codecs import codec_names
from tests.engine.forced import allowed, forced_logits
from tests.model.tiny import random_prompt
from tests.synthetic import relative_error

KIVI = "kivi:bits=2,group=64,residual=64"
MIXED = "0:kivi:bits=4,group=32,residual=32;1-:kivi:bits=2,group=64,residual=16"
EIGHT = ["raw", KIVI, "pertoken:bits=4", "kcvt:bits=4", "gear:bits=2,backbone=kivi"]
EIGHT += ["ott:skip_layers=0", "decoquant", "alignedkv"]
SINKS = [KIVI, f"{KIVI},sink=64", "banded:bits=3", "banded:bits=2,sink=0"]
ALIKE = ["raw", KIVI, MIXED, "raw:dtype=fp16", "kivi:bits=4,group=32,residual=0"]


@pytest.mark.parametrize(
    ("codecs", "n", "tokens"), [(EIGHT, 240, 50), (ALIKE, 150, 40), (SINKS, 180, 30)]
)
def test_a_codec_computes_beside_others_what_it_computes_alone(
    runner, codecs, n, tokens
):
    prompts = dict.fromkeys(codecs, random_prompt(n))
    together = forced_logits(runner, prompts, {x: x for x in codecs}, tokens)
    for codec, prompt in prompts.items():
        alone = forced_logits(runner, {codec: prompt}, {codec: codec}, tokens)
        assert relative_error(together[codec], alone[codec]) <= allowed(codec)


@pytest.mark.parametrize(
    ("codec", "lengths", "tokens", "chunk"),
    [(x, (1, 58, 300), 16, 53) for x in codec_names()]
    + [
        (x, (1, 63, 64, 130, 300), 24, 37)
        for x in (KIVI, MIXED, "h2o", EIGHT[5], "alignedkv")
    ],
)
def test_logits_do_not_depend_on_batch_or_chunks(runner, codec, lengths, tokens, chunk):
    prompts = {str(n): random_prompt(n) for n in lengths}
    codecs = dict.fromkeys(prompts, codec)
    together = forced_logits(runner, prompts, codecs, tokens, max_batch_tokens=chunk)
    for rid, prompt in prompts.items():
        alone = forced_logits(runner, {rid: prompt}, codecs, tokens)
        assert relative_error(together[rid], alone[rid]) <= allowed(codec)


def test_the_tolerance_tells_one_codec_from_another(runner):
    """Also from itself with one token of the prompt changed."""
    prompt = random_prompt(200)
    changed = {
        "same": prompt,
        "token": [*prompt[:40], (prompt[40] + 1) % 250, *prompt[41:]],
    }
    for codec in EIGHT:
        logits = forced_logits(runner, changed, dict.fromkeys(changed, codec), 16)
        assert relative_error(logits["token"], logits["same"]) > 2 * allowed(codec)
    others = ["raw", KIVI, MIXED, *(x for x in EIGHT[2:] if x != "alignedkv")]
    each = forced_logits(
        runner, dict.fromkeys(others, prompt), {x: x for x in others}, 16
    )
    for first, second in (*pairwise(others), ("raw", MIXED)):
        assert relative_error(each[first], each[second]) > 2 * allowed("kivi")
