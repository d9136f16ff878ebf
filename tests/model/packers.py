"""Checkpoints with packed weights, written number by number from the text of each format.

Nothing here is shared with what unpacks them. Each packer turns a weight [out, in] into stored
tensors, and into the weight that those stand for.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
Packed = tuple[Stored, Tensor]
GROUP = 32
FP8_MAX = 448
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the neighbour that each place of a word holds


@dataclass(frozen=True)
class Packer:
    """A format: how it packs a weight by name, and the marker of the folder.

    is_file: whether the marker is hf_quant_config.json
    ending:  how the names of packed weights end
    """

    pack: Callable[[str, Tensor], Packed]
    marker: Mapping[str, Any]
    is_file: bool = False
    ending: str | tuple[str, ...] = "_proj.weight"


def save_packed(plain: Path, folder: Path, packer: Packer) -> Path:
    """Pack a plain checkpoint, and make the plain one hold what the packed one stands for."""
    shutil.copytree(plain, folder)
    weights = load_file(plain / "model.safetensors")
    stored: Stored = {}
    for name, weight in list(weights.items()):
        if name.endswith(packer.ending):
            parts, weights[name] = packer.pack(name, weight.float())
            stored |= parts
        else:
            stored[name] = weight
    save(stored, folder)
    save(weights, plain)
    if packer.is_file:
        marker = {"producer": {"name": "modelopt"}, "quantization": {**packer.marker}}
        (folder / "hf_quant_config.json").write_text(json.dumps(marker))
    else:
        add_to_config(folder, quantization_config=packer.marker)
    return folder


def add_to_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def save(tensors: Stored, folder: Path) -> None:
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def float8(byte: int) -> float:
    """The number of an e4m3 byte: sign, 4 bits of exponent less 7, 3 of mantissa."""
    sign = -1 if byte >> 7 else 1
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 0:
        return float(sign * mantissa / 8 * 2**-6)
    return float(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))


FLOAT8 = np.array([float8(byte) for byte in range(256)], np.float32)


def read_fp8(x: Tensor) -> NDArray[np.float32]:
    return FLOAT8[x.view(torch.uint8).numpy()]


def fp8(
    scale_name: str, height: int, width: int, shape: Sequence[int] = ()
) -> Callable[[str, Tensor], Packed]:
    """FP8 with a scale for each block; `shape` of the scales, if it is not the grid of blocks."""

    def pack(name: str, weight: Tensor) -> Packed:
        rows, columns = weight.shape
        down, across = -(-rows // height), -(-columns // width)
        scale = torch.zeros(down, across)
        codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        meant = torch.zeros(rows, columns)
        for i in range(down):
            for j in range(across):
                block = (
                    slice(i * height, (i + 1) * height),
                    slice(j * width, (j + 1) * width),
                )
                scale[i, j] = weight[block].abs().max() / FP8_MAX
                codes[block] = (weight[block] / scale[i, j]).to(codes.dtype)
                numbers = torch.from_numpy(read_fp8(codes[block].contiguous()))
                meant[block] = numbers * scale[i, j]
        if shape:
            scale = scale.reshape([{-1: down}.get(size, size) for size in shape])
        return {name: codes, name.replace("weight", scale_name): scale}, meant

    return pack


WHOLE = 1 << 20  # a block larger than any weight here


def with_scales(pack: Callable[[str, Tensor], Packed], *names: str) -> Any:
    """Beside a packed weight, scales that are not needed: of activations, of a KV cache."""

    def pack_both(name: str, weight: Tensor) -> Packed:
        stored, meant = pack(name, weight)
        module = name.removesuffix(".weight")
        present = [x for x in names if x[1:2] != "_" or f"{x[0]}_proj" in module]
        return stored | {f"{module}.{x}": torch.ones(1) for x in present}, meant

    return pack_both


def nibbles(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The nearest e2m1 numbers: a place in FP4, and 8 for a sign."""
    distance = np.abs(np.array(FP4) - np.abs(values)[..., None])
    return (distance.argmin(-1) + 8 * (values < 0)).astype(np.uint8)


def fp4_bytes(weight: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Bytes [out, in / 2] of a weight, given the scale of each group, and what they stand for."""
    spread = np.repeat(scales.numpy(), group, axis=1)
    codes = nibbles(weight.numpy() / spread)
    signed = np.array(FP4 + [-x for x in FP4], np.float32)
    data = codes[:, 0::2] + 16 * codes[:, 1::2]
    return torch.from_numpy(data), torch.from_numpy(signed[codes] * spread)


def nvfp4(
    packed_name: str, outer_name: str, is_divisor: bool
) -> Callable[[str, Tensor], Packed]:
    def pack(name: str, weight: Tensor) -> Packed:
        outer = weight.abs().max() / (6 * FP8_MAX)
        peaks = weight.unflatten(-1, (-1, 16)).abs().amax(-1)
        scales = (peaks / 6 / outer).to(torch.float8_e4m3fn)
        stored_outer = 1 / outer if is_divisor else outer
        numbers = torch.from_numpy(read_fp8(scales))
        exact = numbers / stored_outer if is_divisor else numbers * stored_outer
        data, meant = fp4_bytes(weight, exact, 16)
        module = name.removesuffix("weight")
        return {
            module + packed_name: data,
            module + "weight_scale": scales,
            module + outer_name: stored_outer.reshape(1 if is_divisor else ()),
        }, meant

    return pack


def mixed(name: str, weight: Tensor) -> Packed:
    """ModelOpt's attention in FP8, and the rest in NVFP4."""
    pack = fp8("weight_scale", WHOLE, WHOLE, [1])
    if "self_attn" not in name:
        pack = nvfp4("weight", "weight_scale_2", False)
    return pack(name, weight)


def exponents(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Scales that are powers of 2: in bytes, with 127 added to the exponent, and as numbers."""
    peaks = weight.unflatten(-1, (-1, group)).abs().amax(-1)
    exponent = torch.floor(torch.log2(peaks)).clamp(-100) - 2
    return (exponent + 127).to(torch.uint8), 2.0**exponent


def mxfp4(name: str, weight: Tensor) -> Packed:
    scales, numbers = exponents(weight, 32)
    data, meant = fp4_bytes(weight, numbers, 32)
    return {f"{name}_packed": data, f"{name}_scale": scales}, meant


def gpt_oss(name: str, weight: Tensor) -> Packed:
    """Experts [experts, in, out], which are stored as [experts, out, groups, 16]."""
    blocks, all_scales, all_meant = [], [], []
    for expert in weight:
        matrix = expert.T.contiguous()
        scales, numbers = exponents(matrix, 32)
        data, meant = fp4_bytes(matrix, numbers, 32)
        blocks.append(data.reshape(*scales.shape, 16))
        all_scales.append(scales)
        all_meant.append(meant.T)
    return {
        f"{name}_blocks": torch.stack(blocks),
        f"{name}_scales": torch.stack(all_scales),
    }, torch.stack(all_meant)


@dataclass(frozen=True)
class Integers:
    """A weight [out, in] in integers from 0 on, with scale and zero point [out, groups]."""

    codes: NDArray[np.int64]
    scale: NDArray[np.float16]
    zeros: NDArray[np.int64]
    groups: NDArray[np.int64]

    @property
    def meant(self) -> Tensor:
        zeros = self.zeros[:, self.groups]
        numbers = (self.codes - zeros).astype(np.float32)
        return torch.from_numpy(numbers * self.scale[:, self.groups].astype(np.float32))


def integers(
    weight: Tensor, bits: int, groups: NDArray[np.int64], is_symmetric: bool
) -> Integers:
    """The nearest integers, each input in its group."""
    values = weight.numpy()
    top = 2**bits - 1
    count = int(groups.max()) + 1
    scale = np.zeros((len(values), count), np.float16)
    zeros = np.full((len(values), count), 2 ** (bits - 1), np.int64)
    for group in range(count):
        part = values[:, groups == group]
        low, high = part.min(axis=1), part.max(axis=1)
        if is_symmetric:
            scale[:, group] = 2 * np.abs(part).max(axis=1) / top
        else:
            scale[:, group] = (high - low) / top
            zeros[:, group] = np.clip(np.round(-low / scale[:, group]), 1, top)
    codes = np.round(values / scale[:, groups]) + zeros[:, groups]
    return Integers(np.clip(codes, 0, top).astype(np.int64), scale, zeros, groups)


def words(codes: NDArray[np.int64], bits: int) -> Tensor:
    """Numbers [rows, n] in words [rows, n / (32 / bits)], the first in the lowest bits."""
    per_word = 32 // bits
    rows, columns = codes.shape
    packed = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for j in range(columns):
        shift = np.uint32(bits * (j % per_word))
        packed[:, j // per_word] |= codes[:, j].astype(np.uint32) << shift
    return torch.from_numpy(packed.view(np.int32))


def gptq(
    bits: int = 4, less: int = 1, is_ordered: bool = False
) -> Callable[[str, Tensor], Packed]:
    def pack(name: str, weight: Tensor) -> Packed:
        inputs = weight.shape[1]
        groups = np.arange(inputs) // GROUP
        if is_ordered:
            groups = np.random.default_rng(0).permutation(groups)
        x = integers(weight, bits, groups, is_symmetric=False)
        module = name.removesuffix("weight")
        return {
            module + "qweight": words(x.codes, bits).T,
            module + "qzeros": words(x.zeros.T - less, bits),
            module + "scales": torch.from_numpy(x.scale).T,
            module + "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }, x.meant

    return pack


def awq(name: str, weight: Tensor) -> Packed:
    groups = np.arange(weight.shape[1]) // GROUP
    x = integers(weight, 4, groups, is_symmetric=False)
    module = name.removesuffix("weight")
    return {
        module + "qweight": words(interleave(x.codes.T), 4),
        module + "qzeros": words(interleave(x.zeros.T), 4),
        module + "scales": torch.from_numpy(x.scale).T,
    }, x.meant


def interleave(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Outputs in AWQ's order within each eight."""
    order = [8 * (j // 8) + AWQ_ORDER[j % 8] for j in range(codes.shape[1])]
    return codes[:, order]


def compressed_words(
    bits: int, is_symmetric: bool, is_ordered: bool = False
) -> Callable[[str, Tensor], Packed]:
    def pack(name: str, weight: Tensor) -> Packed:
        groups = np.arange(weight.shape[1]) // GROUP
        if is_ordered:
            groups = np.random.default_rng(0).permutation(groups)
        x = integers(weight, bits, groups, is_symmetric)
        stored = {
            f"{name}_packed": words(x.codes, bits),
            f"{name}_scale": torch.from_numpy(x.scale),
            f"{name}_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            stored[f"{name}_zero_point"] = words(x.zeros.T, bits).T
        if is_ordered:
            stored[f"{name}_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return stored, x.meant

    return pack


def compressed_int8(is_symmetric: bool) -> Callable[[str, Tensor], Packed]:
    """int8 with a scale for each output."""

    def pack(name: str, weight: Tensor) -> Packed:
        groups = np.zeros(weight.shape[1], np.int64)
        x = integers(weight, 8, groups, is_symmetric)
        stored = {
            name: torch.from_numpy((x.codes - 128).astype(np.int8)),
            f"{name}_scale": torch.from_numpy(x.scale),
        }
        if not is_symmetric:
            zeros = (x.zeros - 128).astype(np.int8)
            stored[f"{name}_zero_point"] = torch.from_numpy(zeros)
        return stored, x.meant

    return pack


def compressed(form: str, **weights: object) -> dict[str, object]:
    """The marker of compressed-tensors with one group."""
    settings = {"num_bits": 8, "type": "float", "strategy": "channel"} | weights
    group = {"targets": ["Linear"], "weights": {"symmetric": True} | settings}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
PACKERS = {
    "fp8-block": Packer(
        with_scales(fp8("weight_scale_inv", 40, 48), "k_scale", "v_scale"),
        {"quant_method": "fp8", "weight_block_size": [40, 48]},
    ),
    "fp8-tensor": Packer(
        with_scales(fp8("weight_scale", WHOLE, WHOLE, ()), "input_scale"),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fbgemm": Packer(
        with_scales(fp8("weight_scale", 1, WHOLE), "input_scale_ub"),
        {"quant_method": "fbgemm_fp8"},
    ),
    "modelopt-fp8": Packer(
        with_scales(
            fp8("weight_scale", WHOLE, WHOLE, [1]), "input_scale", "k_scale", "v_scale"
        ),
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        is_file=True,
    ),
    "modelopt-channel": Packer(
        fp8("weight_scale", 1, WHOLE, [-1]),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "modelopt-nvfp4": Packer(
        with_scales(nvfp4("weight", "weight_scale_2", False), "input_scale"),
        {"quant_algo": "NVFP4", "group_size": 16},
        is_file=True,
    ),
    "modelopt-mixed": Packer(
        mixed,
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4"},
            },
        },
        is_file=True,
    ),
    "ct-fp8-tensor": Packer(
        fp8("weight_scale", WHOLE, WHOLE, [1]),
        compressed("float-quantized", strategy="tensor"),
    ),
    "ct-fp8-channel": Packer(
        fp8("weight_scale", 1, WHOLE), compressed("float-quantized")
    ),
    "ct-fp8-block": Packer(
        fp8("weight_scale", 40, 48),
        compressed("float-quantized", strategy="block", block_structure=[40, 48]),
    ),
    "ct-fp8-group": Packer(
        fp8("weight_scale", 1, GROUP),
        compressed("naive-quantized", strategy="group", group_size=GROUP),
    ),
    "ct-int8": Packer(compressed_int8(True), compressed("int-quantized", type="int")),
    "ct-int8-zeros": Packer(
        compressed_int8(False),
        compressed("int-quantized", type="int", symmetric=False),
    ),
    "ct-int4": Packer(compressed_words(4, True), compressed("pack-quantized", **INT4)),
    "ct-int4-zeros": Packer(
        compressed_words(4, False),
        compressed("pack-quantized", **INT4, symmetric=False),
    ),
    "ct-int4-order": Packer(
        compressed_words(4, False, is_ordered=True),
        compressed("pack-quantized", **INT4, symmetric=False, actorder="group"),
    ),
    "ct-int2": Packer(
        compressed_words(2, True),
        compressed("pack-quantized", **{**INT4, "num_bits": 2}),
    ),
    "ct-int8-words": Packer(
        compressed_words(8, True),
        compressed("pack-quantized", **{**INT4, "num_bits": 8}),
    ),
    "ct-nvfp4": Packer(
        with_scales(
            nvfp4("weight_packed", "weight_global_scale", True), "input_global_scale"
        ),
        compressed(
            "nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16
        ),
    ),
    "ct-mxfp4": Packer(
        mxfp4,
        compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
    "awq": Packer(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    ),
    "gptq": Packer(gptq(), GPTQ),
    "gptq-v2": Packer(gptq(less=0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-order": Packer(gptq(is_ordered=True), GPTQ | {"desc_act": True}),
    "gptq-8bit": Packer(gptq(8), GPTQ | {"bits": 8}),
}
MXFP4 = Packer(gpt_oss, {"quant_method": "mxfp4"}, ending="_proj")
