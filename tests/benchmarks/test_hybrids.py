"""Benchmarks of hybrids: sizes by hand, and steps whose tokens are those of transformers."""

import pytest

from benchmarks import hybrid_bytes, hybrid_steps
from benchmarks.hybrid_steps import HybridStepsOptions, StepTime
from disagg.codecs.planning import KVShape
from disagg.errors import UnknownNameError
from disagg.kv.page import make_state_layout
from disagg.kv.plan import LayerShape

MIB = 1 << 20


def test_a_hand_off_is_kv_and_states():
    """Two layers of 8 KV heads and 128 channels in 16 bits: 8 KiB a token; and a state of 1 MiB."""
    state = make_state_layout([("recurrent0", "float32", (64, 64, 64))])
    shape = KVShape((LayerShape(8, 128),) * 2, "bfloat16", (state,))

    sizes = hybrid_bytes.sizes_of(shape, "raw:dtype=fp16", 1024)

    assert sizes == {"state": 1, "kv 1k": 8, "all 1k": 9, "percent 1k": 100 / 9}


def test_every_model_has_sizes():
    for model in hybrid_bytes.MODELS:
        config = hybrid_bytes.config_of(model)

        assert len(config["architectures"]) == 1


def test_ratios_are_of_medians():
    ours = [StepTime(wall_s, 0.5) for wall_s in (3.0, 1.0, 9.0)]
    theirs = [StepTime(wall_s, 0.4) for wall_s in (2.0, 2.0, 1.0)]

    row = hybrid_steps.compare(ours, theirs)

    assert row["wall_ratio"] == 1.5
    assert row["cpu_ratio"] == pytest.approx(1.25)


def test_an_unknown_model_is_refused():
    with pytest.raises(UnknownNameError, match="unknown model 'rwkv'; known: bamba"):
        hybrid_steps.measure_hybrid_steps(HybridStepsOptions(models=("rwkv",)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", hybrid_steps.MODELS)
def test_both_sides_choose_the_same_tokens(kind, monkeypatch):
    small = {"hidden_size": 256, "num_hidden_layers": 4}
    monkeypatch.setattr(hybrid_steps, "SHARED", hybrid_steps.SHARED | small)
    sizes = hybrid_steps.MODELS[kind] | {"intermediate_size": 512}
    if kind == "bamba":
        sizes |= {"mamba_n_heads": 8, "attn_layer_indices": [1]}
    monkeypatch.setitem(hybrid_steps.MODELS, kind, sizes)

    options = HybridStepsOptions(models=(kind,), sequences=4, steps=8)
    (row,) = hybrid_steps.measure_hybrid_steps(options)["rows"]

    assert row["equal"] == row["tokens"] == 4 * 13
