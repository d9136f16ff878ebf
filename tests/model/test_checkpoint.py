"""The headers of safetensors files: names, dtypes and shapes, without a weight read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from disagg.errors import ModelError
from disagg.model.checkpoint import TensorHeader, read_headers

ODD_SHAPE = b'{"a": {"dtype": "F32", "data_offsets": [0, 0], "shape": ["x"]}}'


def test_header_names_each_tensor(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
        "a.scale": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    headers = read_headers(tmp_path, ["model.safetensors"])

    assert headers == {
        "a.weight": TensorHeader("BF16", (2, 3), 12, "model.safetensors"),
        "a.scale": TensorHeader("F8_E4M3", (2,), 2, "model.safetensors"),
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        (2).to_bytes(8, "little") + b"[]",
        b"\x05\0\0\0\0\0\0\0{",
        (99_999).to_bytes(8, "little") + b"[" * 99_999,
        len(ODD_SHAPE).to_bytes(8, "little") + ODD_SHAPE,
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(
        ModelError, match=r"model\.safetensors is not a safetensors file"
    ):
        read_headers(tmp_path, ["model.safetensors"])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        read_headers(tmp_path, ["model.safetensors"])


def test_a_tensor_of_two_files_is_refused_by_name(tmp_path: Path) -> None:
    for number, file in enumerate(["a.safetensors", "b.safetensors"]):
        save_file({"a.weight": torch.full((2,), float(number))}, tmp_path / file)

    with pytest.raises(ModelError, match=r"a\.weight is stored twice: in a\..* in b\."):
        read_headers(tmp_path, ["a.safetensors", "b.safetensors"])
