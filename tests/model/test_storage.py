"""Every tensor of a checkpoint is used, or known not to be needed; others are refused by name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from disagg.config import EngineConfig
from disagg.errors import ModelError
from disagg.llm import LLM, SamplingParams
from disagg.model.capacity import check_model
from disagg.model.describe import DEFAULT_MODEL, describe_model
from disagg.model.loading import is_unused, stays_packed
from disagg.model.quantization import METHODS, Quantization, read_quantization
from disagg.model.storage import READERS, read_storage
from disagg.model.weights import load_model
from tests.model.packers import PACKERS, add_to_config, save, save_packed
from tests.model.tiny import save_tiny

TEXT = "It was a dark evening, and the"
SMALL = EngineConfig(arena_bytes=16 << 20)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "llama", num_hidden_layers=1)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Add tensors to a checkpoint, or remove those that are None; __ stands for a dot."""
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if tensor is not None:
            stored[name.replace("__", ".")] = tensor
    save(stored, folder)


def test_every_format_that_passes_its_check_has_a_reader():
    assert READERS.keys() == METHODS.keys()


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "config"])
def test_a_packed_model_says_what_the_model_says(is_file, tmp_path):
    """Repositories of NVIDIA loaded without a word, and answered garbage."""
    plain = Path(shutil.copytree(DEFAULT_MODEL, tmp_path / "plain"))
    packer = PACKERS["modelopt-fp8"]
    marker = {"quant_method": "modelopt", **packer.marker}
    packer = replace(packer, marker=marker, is_file=is_file)
    packed = save_packed(plain, tmp_path / "packed", packer)
    params = SamplingParams(max_tokens=12)

    (expected,) = LLM(str(plain), "raw", config=SMALL).generate(TEXT, params)
    (answer,) = LLM(str(packed), "raw", config=SMALL).generate(TEXT, params)

    assert answer.tokens == expected.tokens


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.float8_e4m3fn),
        ("model.layers.0.mlp.up_proj.weight", torch.int8),
        ("model.layers.0.mlp.up_proj.weight_scale", torch.float32),
        ("model.layers.0.mlp.up_proj.qweight", torch.int32),
    ],
)
def test_packed_weights_that_nothing_describes_are_refused(name, dtype, llama):
    change(llama, **{name: torch.ones(96, 64).to(dtype)})

    with pytest.raises(ModelError, match=rf"{name} is stored as .* no file says how"):
        load_model(describe_model(str(llama)), "cpu")

    fit = check_model(str(llama))

    assert not fit.served
    assert name in fit.reason


def test_a_weight_that_is_plain_and_packed_is_refused(llama, tmp_path):
    packed = save_packed(llama, tmp_path / "packed", PACKERS["gptq"])
    name = "model.layers.0.mlp.up_proj.weight"
    change(packed, **{name: torch.ones(96, 64)})

    with pytest.raises(ModelError, match=f"{name} is stored twice"):
        read_storage(packed)


def test_missing_weights_are_refused_by_name(llama):
    change(llama, model__norm__weight=None)

    assert "lacks 1 weights of its model, such as model.norm.weight" in refusal(llama)


def test_unexpected_weights_are_refused_by_name(llama):
    change(llama, model__nom__weight=torch.ones(64))

    assert (
        "has 1 weights that its model does not know, such as model.nom.weight"
        in refusal(llama)
    )


def test_renamed_weights_are_refused_by_both_names(llama):
    change(llama, model__norm__weight=None, model__nom__weight=torch.ones(64))

    assert "model.norm.weight; it has model.nom.weight instead" in refusal(llama)


def test_weights_of_another_shape_are_refused_by_name(llama):
    change(llama, model__norm__weight=torch.ones(65))

    assert "model.norm.weight has the shape [65]; its model's is [64]" in refusal(llama)


def refusal(folder: Path) -> str:
    """Why a model is not served, which is what loading it says too."""
    fit = check_model(str(folder))
    assert not fit.served
    with pytest.raises(ModelError) as error:
        load_model(describe_model(str(folder)), "cpu")
    assert str(error.value) == fit.reason
    return fit.reason


def test_files_that_nothing_reads_are_no_weights(llama):
    """Mistral's consolidated.safetensors alone was said to be served, and never loaded."""
    (llama / "model.safetensors").rename(llama / "consolidated.safetensors")

    fit = check_model(str(llama))

    assert not fit.served
    assert "lacks weights of its model: there is no model.safetensors" in fit.reason


def test_a_model_of_images_loads_from_other_files_too(tmp_path):
    """As it does where a kernel keeps its weights packed: by transformers."""
    plain = save_tiny("qwen3_vl", tmp_path / "plain")
    folder = Path(shutil.copytree(plain, tmp_path / "bin"))
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    model = load_model(describe_model(str(folder)), "cpu")

    expected = load_model(describe_model(str(plain)), "cpu").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ct-int4", {"weights": {"type": "int"}}),
        ("ct-int4", {"targets": None}),
        ("ct-int4", {"targets": ["re:("]}),
        ("ct-int4", {"targets": [3]}),
        ("ct-int8", {"weights": {"strategy": "group"}}),
        ("ct-int8", {"weights": {"strategy": "block", "block_structure": [0, 1]}}),
        ("gptq", {"group_size": "32"}),
        ("fp8-block", {"weight_block_size": [0, 0]}),
    ],
)
def test_settings_of_packed_weights_that_make_no_sense(name, changes, llama, tmp_path):
    packed = save_packed(llama, tmp_path / "packed", PACKERS[name])
    settings = json.loads((packed / "config.json").read_text())["quantization_config"]
    for group in settings.get("config_groups", {"": settings}).values():
        group.update(changes)
    add_to_config(packed, quantization_config=settings)

    with pytest.raises(ModelError, match=r"settings of .* make no sense"):
        read_storage(packed)


@pytest.mark.parametrize(
    "marker",
    [
        {"quantization": "FP8"},
        {"quantization": [1]},
        {
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {}},
            }
        },
    ],
)
def test_a_marker_that_makes_no_sense_is_refused(marker, llama):
    (llama / "hf_quant_config.json").write_text(json.dumps(marker))

    with pytest.raises(ModelError, match=r"make no sense|expected an object"):
        read_quantization(llama)


def test_a_negative_group_is_no_group(llama, tmp_path):
    packed = save_packed(llama, tmp_path / "packed", PACKERS["gptq-order"])
    stored = load_file(packed / "model.safetensors")
    name = next(name for name in stored if name.endswith("g_idx"))
    save(stored | {name: stored[name] - 1}, packed)

    with pytest.raises(ModelError, match="g_idx has a negative group"):
        load_model(describe_model(str(packed)), "cpu")


def test_a_gap_between_experts_is_refused(tmp_path):
    folder = save_tiny("qwen3_moe", tmp_path, num_hidden_layers=1)
    stored = load_file(folder / "model.safetensors")
    for weight in ("gate_proj", "up_proj", "down_proj"):
        experts = "model.layers.0.mlp.experts"
        stored[f"{experts}.4.{weight}.weight"] = stored.pop(
            f"{experts}.1.{weight}.weight"
        )
    save(stored, folder)

    with pytest.raises(ModelError, match=r"experts\.1\..*_proj\.weight is missing"):
        read_storage(folder)


def test_an_expert_of_another_shape_is_refused(tmp_path):
    folder = save_tiny("qwen3_moe", tmp_path, num_hidden_layers=1)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    change(folder, **{name: torch.ones(47, 64)})

    with pytest.raises(ModelError, match=r"experts\.2\.up_proj\.weight has the shape"):
        read_storage(folder)


UNUSED: list[tuple[str, dict[str, Any], bool]] = [
    ("model.layers.0.self_attn.rotary_emb.inv_freq", {}, True),
    (
        "model.mtp.layers.0.input_layernorm.weight",
        {"num_nextn_predict_layers": 1},
        True,
    ),
    ("model.mtp.layers.0.input_layernorm.weight", {}, False),
    ("model.layers.4.eh_proj.weight", {"num_nextn_predict_layers": 1}, True),
    ("model.layers.4.mlp.up_proj.weight", {"num_nextn_predict_layers": 0}, False),
    ("model.layers.3.eh_proj.weight", {"num_nextn_predict_layers": 1}, False),
    ("model.visual.blocks.0.norm1.weight", {"vision_config": {}}, True),
    ("vision_tower.blocks.0.norm1.weight", {}, False),
    ("model.language_model.norms.weight", {"vision_config": {}}, False),
]


@pytest.mark.parametrize(("name", "changes", "expected"), UNUSED)
def test_what_text_does_not_need_is_known(name, changes, expected):
    config = {"num_hidden_layers": 4, **changes}

    assert is_unused(name, config) is expected


def test_layers_that_draft_tokens_are_left_out(llama):
    add_to_config(llama, num_nextn_predict_layers=1)
    change(llama, **{"model.layers.1.eh_proj.weight": torch.ones(64, 128)})

    load_model(describe_model(str(llama)), "cpu")

    assert check_model(str(llama)).served


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    ({"load_in_8bit": True}, "'bitsandbytes'"),
    ({"quant_method": "hqq"}, "'hqq'"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout gemv"),
    ({"quant_method": "awq", "bits": 3}, "3 bits"),
    ({"quant_method": "gptq", "bits": 3}, "3 bits"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "layout marlin"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:q": {"bits": 8}}}, "dynamic"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "algorithm W4A8_AWQ"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format marlin-24"),
    (
        {"quant_method": "compressed-tensors", "transform_config": {"a": 1}},
        "transform_config",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "sparsity_config": {"format": "sparse-24-bitmask"},
        },
        "sparsity format sparse-24-bitmask",
    ),
    ({"quant_method": "fp8", "weight_block_size": "big"}, "weight_block_size big"),
]


@pytest.mark.parametrize(("marker", "reason"), REFUSED, ids=str)
@pytest.mark.parametrize("is_nested", [False, True], ids=["config", "text_config"])
def test_formats_that_are_not_unpacked_are_refused(marker, reason, is_nested, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    changes = {"quantization_config": marker}
    add_to_config(tmp_path, **({"text_config": changes} if is_nested else changes))

    with pytest.raises(ModelError, match=reason):
        read_quantization(tmp_path)


def test_a_cache_scheme_alone_is_no_packing(llama):
    add_to_config(llama, quantization_config={"quant_algo": None, "kv_cache": "FP8"})
    change(llama, **{"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)})

    assert read_storage(llama).packed == ()
    load_model(describe_model(str(llama)), "cpu")


def test_packed_weights_in_other_files_are_refused(llama):
    add_to_config(llama, quantization_config={"quant_method": "gptq", "bits": 4})
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"no model\.safetensors: packed weights"):
        load_model(describe_model(str(llama)), "cpu")


@pytest.mark.parametrize(
    ("method", "capability", "expected"),
    [
        ("mxfp4", (9, 0), True),
        ("mxfp4", (7, 0), False),
        ("fp8", (8, 0), False),
        ("modelopt", (9, 0), False),
    ],
)
def test_kernels_of_transformers_are_used_where_they_are(
    method, capability, expected, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    quantization = Quantization(method, {})

    config = PreTrainedConfig(quantization_config={"quant_method": method})

    assert stays_packed(quantization, "cuda", config) is expected
    assert not stays_packed(quantization, "cpu", config)
    assert not stays_packed(None, "cuda", config)
    # of a part that does not know how the whole is packed
    assert not stays_packed(quantization, "cuda", PreTrainedConfig())
