"""The benchmarks of decoding, at sizes that say nothing of speed: what it runs and refuses."""

import json
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor

from disagg.bench import capacity, decode
from disagg.bench.inputs import shape_of, slabs_for
from disagg.codecs import codec_names
from disagg.codecs.planning import parse_plan
from disagg.engine.arena import make_pool
from disagg.kv.pool import Pool
from disagg.model.capacity import slab_bytes_for
from disagg.model.graphs import Recording
from disagg.model.runner import Runner

LITTLE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 50,
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Runner:
    folder = tmp_path_factory.mktemp("little")
    (folder / "config.json").write_text(json.dumps(decode.MODELS["small"] | LITTLE))
    return Runner.random(str(folder), "float32")


@pytest.mark.parametrize("spec", codec_names())
def test_sequences_of_every_codec_decode_and_seal_their_pages(runner, spec):
    decoding = decode.Decoding(runner, spec, 3, 250, decode.WARM_UP + 20)

    for _ in range(20):
        decoding.step()

    assert len(decoding.times) == 20
    assert all(0 < planned < total for planned, total in decoding.times)
    (group,), n = decoding.plan.groups, 250 + decode.WARM_UP + 20
    for (state,) in decoding._states:
        assert state.num_pages == group.sealed(n) // group.page.tokens
        assert len(state.tail) == -(-(n - group.sealed(n)) // 16)
    decoding._pool.check_integrity()


def test_rows_say_how_a_codec_compares_with_raw_pages(monkeypatch):
    monkeypatch.setitem(decode.MODELS, "little", decode.MODELS["small"] | LITTLE)
    small = {"model": "little", "sizes": ["2x100"], "steps": 2, "rounds": 1}
    options = decode.DecodeOptions(codecs=["kivi"], **small)

    raw, kivi = decode.run(options)["rows"]

    assert (raw["codec"], raw["ratio"], raw["size"]) == ("raw:dtype=fp32", 1.0, "2x100")
    assert kivi["ratio"] == pytest.approx(raw["step_ms"] / kivi["step_ms"])
    assert kivi["tokens_per_s"] == pytest.approx(2000 / kivi["step_ms"])
    assert all(row["own"] < 1 for row in (raw, kivi))


def test_arenas_of_one_size_are_freed_before_the_next(monkeypatch, runner):
    arenas: list[ReferenceType[Tensor]] = []

    def make(*arguments: Any) -> tuple[Pool, Tensor]:
        pool, arena = make_pool(*arguments)
        arenas.append(ref(arena))
        return pool, arena

    monkeypatch.setattr(decode, "make_pool", make)
    recorder = SimpleNamespace(record=lambda call: Recording(call, call()))
    runner.record_steps(recorder)
    options = decode.DecodeOptions(codecs=["kivi"], steps=1, rounds=1)
    for tokens in (100, 200):
        assert not any(arena() is not None for arena in arenas)
        decode._measure(runner, options, 2, tokens)
    assert len(arenas) == 4
    runner.graphs = None


def test_by_default_all_codecs_fit_an_80_gb_gpu_beside_an_8b():
    defaults = decode.DecodeOptions()
    steps = decode.WARM_UP + defaults.steps * defaults.rounds
    weight_bytes = capacity.WEIGHT_BYTES * capacity.parameters()

    for size in decode.SIZES["cuda"]:
        num_sequences, tokens = decode.parse_size(size)
        nbytes = 0
        for spec in decode.CODECS:
            plan = parse_plan(spec, shape_of())
            arena_bytes = num_sequences * plan.nbytes(tokens + steps)
            slab_bytes = slab_bytes_for(shape_of(), [plan], arena_bytes, tokens)
            nbytes += slab_bytes * slabs_for(
                plan, tokens + steps, slab_bytes, num_sequences, decode.SPARE_RECORDS
            )
        assert nbytes + weight_bytes < capacity.USABLE * 80e9, size


@pytest.mark.parametrize(
    ("ratios", "tokens"),
    [
        ([(1000, 0.8), (2000, 1.2), (4000, 1.5)], 1500),
        ([(1000, 1.1), (2000, 1.2)], 1000),
        ([(1000, 1.1), (2000, 0.9), (4000, 1.1)], 3000),
        ([(1000, 0.8), (2000, 1.0)], None),
    ],
    ids=["between two sizes", "at the smallest already", "for good", "never"],
)
def test_a_row_says_from_how_many_tokens_a_codec_is_faster(ratios, tokens):
    assert decode.faster_from(ratios) == tokens


def test_attention_does_nothing_where_only_the_modules_are_timed(runner):
    decoding = decode.Decoding(runner, "kivi", 3, 250, 20)
    arena_before = decoding._arena.clone()

    decoding.pass_modules()

    assert len(decoding.modules_s) == 1
    assert torch.equal(decoding._arena, arena_before)
