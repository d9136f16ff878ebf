"""Packed checkpoints answer as the weights that they stand for, or are refused by name."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from disagg.config import EngineConfig
from disagg.errors import ModelError
from disagg.llm import LLM, SamplingParams
from disagg.model.capacity import check_model
from disagg.model.describe import describe_model
from disagg.model.storage import read_storage
from disagg.model.weights import fingerprint_model, load_model
from tests.model.packers import (
    MXFP4,
    PACKERS,
    Packed,
    Packer,
    fp8,
    save,
    save_packed,
)
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_tiny

PROMPT = random_prompt(37)
TOKENS = 12
SMALL = EngineConfig(arena_bytes=16 << 20)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(scope="module", params=PACKERS)
def pair(request, llama, tmp_path_factory) -> tuple[Path, Path]:
    """A plain checkpoint, and a packed one that stands for the same weights."""
    folder = tmp_path_factory.mktemp(request.param)
    plain = Path(shutil.copytree(llama, folder / "plain"))
    return plain, save_packed(plain, folder / "packed", PACKERS[request.param])


def assert_equal_weights(plain: Path, packed: Path) -> None:
    expected = load_model(describe_model(str(plain)), "cpu").state_dict()
    weights = load_model(describe_model(str(packed)), "cpu").state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


def answer(folder: Path) -> tuple[int, ...]:
    llm = LLM(str(folder), "raw", config=SMALL)
    (completion,) = llm.generate([PROMPT], SamplingParams(max_tokens=TOKENS))
    return tuple(completion.tokens)


def test_weights_are_those_that_the_packed_ones_stand_for(pair, llama):
    plain, packed = pair

    assert_equal_weights(plain, packed)

    storage = read_storage(packed)
    original = load_file(llama / "model.safetensors")
    rounded = load_file(plain / "model.safetensors")

    assert len(storage.packed) == 7
    assert not any(
        torch.equal(original[weight.name], rounded[weight.name])
        for weight in storage.packed
    )


def test_tokens_are_those_of_the_unpacked_model(pair):
    plain, packed = pair
    expected = ReferenceModel(str(plain)).generate(PROMPT, TOKENS)

    assert answer(packed) == expected.tokens


def test_every_part_of_a_packed_weight_is_needed(pair, tmp_path):
    _, packed = pair
    stored = load_file(packed / "model.safetensors")
    weight = read_storage(packed).packed[0]
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    module = re.escape(weight.name.removesuffix("weight"))

    for name in weight.parts.values():
        rest = {other: x for other, x in stored.items() if other != name}
        save(rest, copy)
        with pytest.raises(ModelError, match=module):
            read_storage(copy)
        save(rest | {f"{name}_old": stored[name]}, copy)
        with pytest.raises(ModelError, match=module):
            read_storage(copy)


def test_a_part_of_another_shape_is_refused_by_name(pair, tmp_path):
    _, packed = pair
    stored = load_file(packed / "model.safetensors")
    weight = read_storage(packed).packed[0]
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    module = re.escape(weight.name.removesuffix("weight"))

    for name in weight.parts.values():
        longer = torch.cat([stored[name].reshape(-1).view(torch.uint8)] * 3)
        save(stored | {name: longer.view(stored[name].dtype)}, copy)
        with pytest.raises(ModelError, match=module):
            read_storage(copy)


@pytest.mark.parametrize("name", ["fp8-tensor", "ct-nvfp4", "gptq"])
def test_sizes_are_those_of_unpacked_weights(name, llama, tmp_path):
    plain = Path(shutil.copytree(llama, tmp_path / "plain"))
    packed = save_packed(plain, tmp_path / "packed", PACKERS[name])

    fit = check_model(str(packed), "float16")

    assert fit.served
    assert fit.weights_bytes == check_model(str(plain), "float16").weights_bytes


def test_both_sides_of_a_transfer_see_one_model(llama, tmp_path):
    plain = Path(shutil.copytree(llama, tmp_path / "plain"))
    packed = save_packed(plain, tmp_path / "packed", PACKERS["modelopt-fp8"])
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))

    assert fingerprint_model(copy) == fingerprint_model(packed)

    (copy / "hf_quant_config.json").unlink()

    assert fingerprint_model(copy) != fingerprint_model(packed)


def test_experts_of_gpt_oss_are_unpacked(tmp_path):
    plain = save_tiny("gpt_oss", tmp_path / "plain", num_hidden_layers=1)
    packed = save_packed(plain, tmp_path / "packed", MXFP4)

    assert_equal_weights(plain, packed)
    assert answer(packed) == ReferenceModel(str(plain)).generate(PROMPT, TOKENS).tokens


@pytest.mark.parametrize("name", ["fp8-block", "gptq"])
def test_experts_with_files_of_their_own_are_unpacked(name, tmp_path):
    plain = save_tiny(
        "qwen3_moe",
        tmp_path / "plain",
        num_hidden_layers=1,
        moe_intermediate_size=32,
    )
    packed = save_packed(plain, tmp_path / "packed", PACKERS[name])

    assert len(read_storage(packed).packed) == 4 + 4 * 3
    assert_equal_weights(plain, packed)


def test_experts_in_one_tensor_are_unpacked(tmp_path):
    plain = save_tiny("qwen3_moe", tmp_path / "plain", num_hidden_layers=1)
    model = load_model(describe_model(str(plain)), "cpu")
    save({name: x.detach() for name, x in model.named_parameters()}, plain)
    packed = save_packed(
        plain,
        tmp_path / "packed",
        Packer(
            pack_stack,
            {"quant_method": "fp8", "weight_block_size": [40, 48]},
            ending=("experts.gate_up_proj", "experts.down_proj"),
        ),
    )

    assert_equal_weights(plain, packed)


def pack_stack(name: str, weights: torch.Tensor) -> Packed:
    """Experts in one tensor, as transformers 5 saves them: a stack of matrices and of scales."""
    pack = fp8("scale", 40, 48)
    packed = [pack("weight", weight) for weight in weights]
    stored = {
        name: torch.stack([parts["weight"] for parts, _ in packed]),
        f"{name}_scale_inv": torch.stack([parts["scale"] for parts, _ in packed]),
    }
    return stored, torch.stack([meant for _, meant in packed])
