import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.errors import ConfigError, ModelError
from disagg.model.attention import Batch, Chunk
from disagg.model.capacity import class_of
from disagg.model.describe import describe_model
from disagg.model.probe import check_attention
from disagg.model.runner import Runner, pick_device
from disagg.model.weights import fingerprint_model, load_model
from tests.engine.margins import assert_same
from tests.engine.serving import make_engine, serve
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_config, save_tiny


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl", "qwen3_5_text"])
def test_random_weights_fit_the_class_that_is_served(kind, tmp_path):
    folder = save_config(kind, tmp_path)

    runner = Runner.random(str(folder))

    expected, _ = class_of(runner.info)
    assert type(runner._forward.model) is expected


def test_a_fingerprint_covers_config_and_weights_not_the_path(tiny, tmp_path):
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    original = fingerprint_model(tiny)

    assert Runner.load(str(copy)).fingerprint == original

    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})

    assert fingerprint_model(copy) != original

    shutil.copy(tiny / "model.safetensors", copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))

    assert fingerprint_model(copy) != original


def test_a_model_without_all_of_its_weights_is_refused(tiny, tmp_path):
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]

    save_file(weights, copy / "model.safetensors", {"format": "pt"})

    with pytest.raises(
        ModelError, match=r"lacks 1 weights .* model\.layers\.1\.mlp\.up_proj"
    ):
        Runner.load(str(copy))


def test_weights_that_are_cut_short_are_refused(tiny, tmp_path):
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    file = copy / "model.safetensors"

    file.write_bytes(file.read_bytes()[:1000])

    with pytest.raises(
        ModelError, match=r"model\.safetensors is not a safetensors file"
    ):
        Runner.load(str(copy))


@pytest.mark.parametrize(
    "kind", ["mistral", "phimoe"]
)  # one tells attention, one only masks
def test_windows_that_the_model_does_not_share_are_refused(kind, tmp_path):
    info = describe_model(str(save_tiny(kind, tmp_path, sliding_window=20)))
    model = load_model(info, "cpu")

    layers = info.layers
    without_windows = tuple(replace(layer, window=None) for layer in layers)

    assert [layer.window for layer in layers] == [20] * 3
    with pytest.raises(ModelError, match="a window of 20"):
        check_attention(model, replace(info, layers=without_windows))


@pytest.mark.parametrize("kind", ["glm4", "granite", "gpt_neox", "seed_oss"])
def test_a_window_that_the_architecture_does_not_know_is_none(kind, tmp_path):
    path = str(save_tiny(kind, tmp_path, sliding_window=20))
    prompt = random_prompt(70)
    (answer,) = serve(
        make_engine(Runner.load(path), max_batch_tokens=61), [prompt], "raw", 8
    )

    # without a cache, which would have the window
    logprobs = ReferenceModel(path).logprobs([*prompt, *answer])

    assert logprobs[len(prompt) - 1 : -1].argmax(1).tolist() == answer


def test_windows_by_layer_need_an_architecture_that_has_them(tmp_path):
    strange = {"sliding_window": 20, "layer_types": ["sliding_attention"] * 3}
    path = save_tiny("seed_oss", tmp_path, **strange)

    with pytest.raises(ModelError, match="a window of None where its config says 20"):
        Runner.load(str(path))


def test_models_run_in_16_bits_too(tiny):
    runner = Runner.load(str(tiny), "float16")

    assert runner.shape.dtype == "float16"

    engine = make_engine(runner, max_batch_tokens=40)
    (answer,) = serve(engine, [random_prompt(70)], "raw", 8)

    assert len(answer) == 8

    (group,) = engine.plan("raw").groups

    assert group.raw.plane("k").dtype == "float16"


def test_only_wanted_rows_have_logits(tiny):
    runner = Runner.load(str(tiny))
    chunk = Chunk(0, 4, 0, runner.workspace(4), lambda *_: None)

    logits = runner.forward(
        Batch([1, 2, 3, 4], [0, 1, 2, 3], [3, 1], torch.empty(0), (chunk,))
    )

    assert logits.shape == (2, runner.info.vocab_size)
    assert logits.dtype == torch.float32


def test_bfloat16_weights_are_loaded_as_float16_on_old_chips(tiny, monkeypatch):
    info = replace(describe_model(str(tiny)), dtype="bfloat16")  # as on a GPU

    def described(ref, dtype, *_):
        return info if dtype == "auto" else replace(info, dtype=dtype)

    monkeypatch.setattr("disagg.model.runner.describe_model", described)
    for has, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr("disagg.model.runner.has_bfloat16", lambda has=has: has)
        runner = Runner.load(str(tiny))
        assert runner.info.dtype == str(dtype).removeprefix("torch.")
        assert next(runner._forward.parameters()).dtype == dtype

    by_name = Runner.load(str(tiny), dtype="bfloat16")

    assert by_name.info.dtype == "bfloat16"


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_where_there_is_one(has_gpu, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)

    assert pick_device("auto") == device
    assert pick_device("cpu") == "cpu"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no GPU here"):
        Runner.load(device="cuda")


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="'tpu' is unknown; known: auto, cpu, cuda"):
        pick_device("tpu")


LONG = {
    "short_factor": [1.5] * 8,
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("kind", "rope"),
    [("phi3", {"rope_type": "longrope", **LONG}), ("llama", {"rope_type": "dynamic"})],
)
def test_a_rotary_embedding_that_may_switch_asks_for_no_position(
    kind, rope, tmp_path, monkeypatch
):
    """A GPU would wait for it in every step, so none was recorded."""
    rope = rope | {"rope_theta": 1e4, "factor": 8.0}
    path = str(save_tiny(kind, tmp_path, head_dim=16, rope_parameters=rope))
    runner, prompt = Runner.load(path), random_prompt(30)
    expected = ReferenceModel(path).generate(prompt, 12)
    monkeypatch.setattr(torch, "max", None)
    (answer,) = serve(make_engine(runner), [prompt], "raw", 12)
    assert_same(answer, expected)
