"""The life of a sequence, and what its KV takes."""

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.engine.sequence import ARROWS, Request, SamplingParams, Sequence, Status, handoff_stats

SHAPE = KVShape(num_layers=3, heads=2, head_dim=64, dtype="float32", windows=(None,) * 3)


def test_every_state_can_end_and_the_end_is_final():
    assert set(ARROWS) == set(Status)
    assert all(Status.DONE in after for before, after in ARROWS.items() if before != Status.DONE)
    assert ARROWS[Status.DONE] == ()
    request, plan = Request("r", (1,), SamplingParams(), "raw"), parse_plan("raw", SHAPE)
    ended = Sequence(request, plan, born=0.0, order=0, status=Status.DONE)
    with pytest.raises(AssertionError, match="done does not become decode"):
        ended.enter(Status.DECODE)


def test_sizes_of_a_prompt_are_those_of_its_plan():
    plan = parse_plan("0:raw;1-:kivi:bits=4,group=32,residual=32", SHAPE)
    stats = handoff_stats(plan, tokens=200, cached_tokens=16, encode_ms=1.5)
    assert stats.fp16_bytes == 2 * stats.fp8_bytes == 200 * 3 * 2 * 2 * 64 * 2
    assert stats.resident_bytes == plan.nbytes(200)
    assert (stats.codec, stats.tokens, stats.encode_ms) == (plan.spec, 200, 1.5)
    assert stats.wire_bytes == 0
