"""The tensors of a checkpoint, from the headers of its safetensors files. Reads no weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from disagg.errors import ModelError

LENGTH_BYTES = 8  # a file begins with the length of its header
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
HEADER_ERRORS = (
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
METADATA = "__metadata__"  # the one entry of a header that is not a tensor


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a checkpoint.

    dtype:  safetensors' name, such as "BF16", "F8_E4M3" or "I32"
    nbytes: as stored
    file:   the name of its file
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


def read_headers(folder: Path, files: list[str]) -> dict[str, TensorHeader]:
    """The tensors in some safetensors files of a folder, by name.

    ModelError for a file that is missing or is not a safetensors file, and for a tensor in two
    files: nothing says which one counts.
    """
    headers: dict[str, TensorHeader] = {}
    for file in files:
        of_file = _read_header(folder / file)
        for name in headers.keys() & of_file.keys():
            raise ModelError(
                f"{folder}: {name} is stored twice: in {headers[name].file} and in {file}"
            )
        headers |= of_file
    return headers


def _read_header(file: Path) -> dict[str, TensorHeader]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            entries = json.loads(stream.read(length))
        end = LENGTH_BYTES + length + _data_bytes(entries)
        if end > file.stat().st_size:
            raise ValueError(f"it ends before byte {end}")
        return {
            name: _tensor_header(entry, file.name)
            for name, entry in entries.items()
            if name != METADATA
        }
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    except HEADER_ERRORS as error:
        raise ModelError(f"{file} is not a safetensors file: {error}") from error


def _data_bytes(entries: Mapping[str, Mapping[str, list[int]]]) -> int:
    """Bytes behind the header of a file."""
    ends = (
        entry["data_offsets"][1] for name, entry in entries.items() if name != METADATA
    )
    return max(ends, default=0)


def _tensor_header(entry: Mapping[str, list[int]], file: str) -> TensorHeader:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a tensor of the shape {[*shape]}")
    return TensorHeader(
        dtype=str(entry["dtype"]),
        shape=shape,
        nbytes=end - start,
        file=file,
    )
