import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from disagg.errors import ConfigError, ModelError
from disagg.kv.plan import LayerShape
from disagg.model import cpu, describe
from disagg.model.capacity import check_model
from disagg.model.describe import check_weights, describe_model, locate_model
from tests.model.tiny import CONTEXT, VOCAB, save_config, save_tiny

PLAIN: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
PLAIN |= {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN |= {"num_hidden_layers": 3, "vocab_size": 100, "max_position_embeddings": 2048}
ORIGINAL = "original_max_position_embeddings"
ROPE = {"rope_theta": 1e4, "factor": 8.0}
DYNAMIC_ROPE = ROPE | {"rope_type": "dynamic"}
LONG_ROPE = ROPE | {"rope_type": "longrope", ORIGINAL: 64}
LONG_ROPE |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


def write(folder: Path, **changes: Any) -> str:
    config = {k: v for k, v in (PLAIN | changes).items() if v != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_sizes_of_a_llama_are_read_from_its_config(tmp_path):
    info = describe_model(write(tmp_path, eos_token_id=[7, 9]))

    assert info.layers == (LayerShape(heads=2, head_dim=32),) * 3
    assert info.query_heads == 4
    assert (info.context_length, info.vocab_size, info.eos_ids) == (2048, 100, (7, 9))


OWN_CODE = {"AutoConfig": "configuration_x.XConfig"}


def test_a_models_own_code_is_never_run(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a question"))
    path = write(tmp_path, model_type="x", auto_map=OWN_CODE, vocab_size="absent")

    with pytest.raises(ModelError, match=r"^x needs code from its own repository"):
        describe_model(path)


def test_a_known_type_is_served_by_its_own_class(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a question"))
    path = write(tmp_path, auto_map=OWN_CODE, vocab_size="absent")

    assert describe_model(path).vocab_size == 32000
    assert check_model(path).served


def test_absent_kv_heads_mean_one_for_each_query_head(tmp_path):
    info = describe_model(write(tmp_path, num_key_value_heads="absent"))
    assert [layer.heads for layer in info.layers] == [4] * 3


def test_every_file_may_name_tokens_that_end_a_text(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))

    assert describe_model(write(tmp_path, eos_token_id=7)).eos_ids == (3, 7)


@pytest.mark.parametrize(
    ("dtype", "device", "stored", "units", "nbytes", "expected"),
    [
        ("auto", "cpu", "bfloat16", True, 100_000_000, "bfloat16"),
        ("auto", "cpu", "bfloat16", True, 99_999_999, "float32"),
        ("auto", "cpu", "bfloat16", False, 100_000_000, "float32"),
        ("auto", "cpu", "float16", True, 100_000_000, "float32"),
        ("auto", "cuda", "bfloat16", False, 99, "bfloat16"),
        ("float16", "cpu", "bfloat16", True, 100_000_000, "float16"),
    ],
)
def test_auto_is_bfloat16_on_a_cpu_where_that_pays(
    dtype, device, stored, units, nbytes, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(describe, "has_bfloat16_units", lambda: units)
    path = write(tmp_path, dtype=stored)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(nbytes)  # takes no room on the disk

    assert describe_model(path, dtype, device).dtype == expected


@pytest.mark.parametrize(
    ("flags", "has_units"),
    [
        ("fpu avx512_bf16 amx_tile", True),
        ("fpu amx_bf16", True),
        ("fpu avx512f avx512_vnni", False),
        ("", False),
    ],
)
def test_bfloat16_units_are_those_that_linux_lists(
    flags, has_units, tmp_path, monkeypatch
):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")

    assert cpu.has_bfloat16_units.__wrapped__() is has_units


def test_the_packaged_model_is_too_small_for_bfloat16():
    assert describe_model().dtype == "float32"


BF16 = torch.zeros(64, dtype=torch.bfloat16)
PACKED = torch.zeros(1024, dtype=torch.uint8)
SCALES = torch.zeros(4)


@pytest.mark.parametrize(
    ("config", "tensors", "expected"),
    [
        ({"dtype": "float16"}, {}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, {}, "bfloat16"),
        ({"text_config": PLAIN | {"dtype": "bfloat16"}}, {}, "bfloat16"),
        ({}, {"w": BF16, "blocks": PACKED, "scales": SCALES}, "bfloat16"),
        ({"dtype": "float8_e4m3fn"}, {"w": BF16}, "bfloat16"),
        ({}, {"w": SCALES}, "float32"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, {}, "bfloat16"),
        ({}, {}, "float32"),
    ],
    ids=[
        "config",
        "with-a-prefix",
        "text-config",
        "most-bytes-of-the-weights",
        "not-one-to-compute-in",
        "weights-in-float32",
        "quantized-without-weights",
        "nothing-says",
    ],
)
def test_the_dtype_is_that_of_config_text_config_or_weights(
    config, tensors, expected, tmp_path
):
    if tensors:
        save_file(tensors, tmp_path / "model.safetensors")

    assert describe_model(write(tmp_path, **config), device="cuda").dtype == expected


def windows_of(path: str) -> list[int | None]:
    return [layer.window for layer in describe_model(path).layers]


def test_windows_follow_the_layer_types(tmp_path):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    path = write(
        tmp_path, model_type="qwen3", head_dim=32, layer_types=types, sliding_window=64
    )

    assert windows_of(path) == [64, None, 64]


def test_a_window_without_layer_types_holds_for_every_layer(tmp_path):
    path = write(tmp_path, model_type="mistral", head_dim=32, sliding_window=64)
    assert windows_of(path) == [64, 64, 64]


def test_fields_missing_in_a_config_come_from_transformers(tmp_path):
    path = write(
        tmp_path, model_type="mistral", num_key_value_heads=2
    )  # no window, no head dim
    info = describe_model(path)

    assert info.layers == (LayerShape(2, 32, window=4096),) * 3


@pytest.mark.parametrize(
    ("kind", "max_length", "in_json"),
    [
        ("llama", 512, {"rope_parameters": LONG_ROPE}),
        ("llama", 512, {"rope_parameters": DYNAMIC_ROPE}),
        ("llama", 64, {"rope_parameters": DYNAMIC_ROPE | {ORIGINAL: 512}}),
        ("llama", 512, {"rope_parameters": LONG_ROPE | {ORIGINAL: 256}, ORIGINAL: 64}),
        ("qwen3", 512, {"rope_scaling": LONG_ROPE}),  # beside rope_parameters, as saved
        ("gemma3_text", 512, {"rope_parameters": {"full_attention": LONG_ROPE}}),
        (
            "phi3",
            512,
            {"rope_parameters": LONG_ROPE | {"rope_type": "su"}, ORIGINAL: 64},
        ),
    ],
)
def test_frequencies_change_behind_the_switch_or_the_context(
    kind, max_length, in_json, tmp_path
):
    sizes = {"hidden_size": 128, "max_position_embeddings": max_length}
    file = save_config(kind, tmp_path, **sizes) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | in_json))
    info = describe_model(str(tmp_path))
    length = info.rope_switch or info.context_length
    config = AutoConfig.from_pretrained(tmp_path)
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    layer = ["full_attention"] if kind == "gemma3_text" else []

    def first_turns(count: int) -> Tensor:
        return rotary(torch.zeros(1), torch.arange(count)[None], *layer)[0][:, :64]

    short = first_turns(64)
    assert torch.equal(first_turns(length), short)
    assert not torch.equal(first_turns(length + 1), short)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"cross_attention_layers": [1]}, "attends to images in separate layers"),
        ({"layer_types": ["linear_attention"] * 3}, "no attention layer"),
        ({"layer_types": ["conv", *["full_attention"] * 2]}, "layers of type conv"),
        ({"indexer_budget": 2048}, r"an indexer picks, .* \(indexer_budget\)"),
        ({"vocab_size": "absent", "model_type": "no-such-type"}, "no-such-type"),
    ],
)
def test_what_pages_cannot_serve_is_refused_by_its_config(changes, reason, tmp_path):
    with pytest.raises(ModelError, match=reason):
        describe_model(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": -2}, "no usable num_key_value_heads"),
        ({"head_dim": "64"}, "no usable head_dim"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"architectures": "LlamaForCausalLM"}, "expected a list"),
        ({"architectures": {"a": 1}}, "expected a list"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(changes, reason, tmp_path):
    folder = write(tmp_path, **changes)

    with pytest.raises(ModelError, match=reason):
        describe_model(folder)

    assert reason in check_model(folder).reason


@pytest.mark.parametrize("context", [0, -5, 1, True, 2.5, "x"])
def test_a_context_is_a_number_of_tokens_from_two(context, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.context is .* at least 2"):
        describe_model(write(tmp_path), context=context)


@pytest.mark.parametrize("weight_map", [[1], None, "x", {"a": 1}, {"a": ["x"]}])
def test_an_index_that_names_no_files_is_refused(weight_map, tmp_path):
    folder = write(tmp_path)
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelError, match="weight_map is no object of file names"):
        check_weights(Path(folder))


def test_a_missing_model_is_named_with_the_way_to_get_it():
    with pytest.raises(ModelError, match="hf download nobody/nothing"):
        describe_model("nobody/nothing")
    with pytest.raises(ModelError, match="no such folder"):
        describe_model("~nobody-of-that-name/llama")
    with pytest.raises(ModelError, match="no such folder") as refused:
        describe_model("/no/such/folder")
    assert "hf download" not in str(refused.value)


def test_a_name_that_is_nearly_one_to_fetch_is_told_so():
    with pytest.raises(ModelError, match="`disagg fetch smollm2`"):
        locate_model("SmolLM")


def test_the_packaged_model_has_a_name_unless_a_folder_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert locate_model("default") == locate_model()

    (tmp_path / "default").mkdir()

    assert locate_model("default") != locate_model()


def test_folders_without_a_readable_config_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        describe_model(str(tmp_path))

    (tmp_path / "config.json").write_text("{")

    with pytest.raises(ModelError, match="not JSON"):
        describe_model(str(tmp_path))

    (tmp_path / "config.json").write_text("[" * 99_999)

    with pytest.raises(ModelError, match="not JSON"):
        describe_model(str(tmp_path))
    with pytest.raises(ModelError, match="is a file"):
        describe_model(str(tmp_path / "config.json"))


def test_a_name_is_found_in_the_local_cache(tmp_path, monkeypatch):
    model = tmp_path / "models--some--model"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    write(snapshot)

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    assert describe_model("some/model").path == snapshot


def test_describing_and_tokenizing_need_no_heavy_imports(tmp_path):
    path = save_tiny("llama", tmp_path)
    code = (
        "import sys; from disagg.model.describe import describe_model;"
        "from disagg.model.tokenizer import Tokenizer;"
        f"info = describe_model({str(path)!r}); ids = Tokenizer.load({str(path)!r}).encode('hi');"
        "print(info.vocab_size, info.context_length, len(ids),"
        " [x for x in ('torch', 'transformers') if x in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == f"{VOCAB} {CONTEXT} 2 []"
