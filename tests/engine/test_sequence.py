"""The life of a sequence, and what its KV takes."""

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.engine.sequence import ARROWS, Life, Status, handoff_stats


def test_a_life_sums_the_time_in_each_state():
    life = Life(since=10.0)
    for status, now in (
        (Status.PREFILL, 11.0),
        (Status.DECODE, 14.0),
        (Status.QUEUED, 15.0),
        (Status.PREFILL, 20.0),
        (Status.DECODE, 21.0),
        (Status.DONE, 24.0),
    ):
        life.enter(status, now)
    assert life.spent == {Status.QUEUED: 6.0, Status.PREFILL: 4.0, Status.DECODE: 4.0}
    assert life.age(now=30.0) == 20.0


def test_every_state_can_end_and_the_end_is_final():
    assert set(ARROWS) == set(Status)
    assert all(Status.DONE in after for before, after in ARROWS.items() if before != Status.DONE)
    assert ARROWS[Status.DONE] == ()
    life = Life(since=0.0, status=Status.DONE)
    with pytest.raises(AssertionError, match="done does not become decode"):
        life.enter(Status.DECODE, 1.0)


def test_sizes_of_a_prompt_are_those_of_its_plan():
    shape = KVShape(num_layers=3, heads=2, head_dim=64, dtype="float32", windows=(None,) * 3)
    plan = parse_plan("0:raw;1-:kivi:bits=4,group=32,residual=32", shape)
    stats = handoff_stats(plan, tokens=200, cached_tokens=16, encode_ms=1.5)
    assert stats.fp16_bytes == 2 * stats.fp8_bytes == 200 * 3 * 2 * 2 * 64 * 2
    assert stats.resident_bytes == plan.nbytes(200)
    assert (stats.codec, stats.tokens, stats.encode_ms) == (plan.spec, 200, 1.5)
    assert stats.wire_bytes == 0
