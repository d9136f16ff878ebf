"""Weights: from files to a model on its device, once in memory; and the fingerprint of the files.

stored as it is computed, on a CPU     the mapped files are the weights
anything else                          tensor by tensor: read, converted, uploaded, let go
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging
from xxhash import xxh3_128

from disagg.errors import ModelError
from disagg.model.attention import IMPLEMENTATION
from disagg.model.capacity import class_of
from disagg.model.describe import (
    ModelInfo,
    named_weights,
    read_config,
    stored_dtype,
    user_cache,
)

READ_BYTES = 16 << 20
NOTED_BYTES = 64 << 20  # less is read as soon as a note is found
SETTLED_NS = (
    2 * 10**9
)  # files that changed a moment ago may change again within a tick of clocks
LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    ImportError,
    RuntimeError,
    SafetensorError,
)
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def load_model(info: ModelInfo, device: str) -> PreTrainedModel:
    """The model of a folder on a device; ModelError where its weights cannot be read or lack some.

    What is no safetensors, or is quantized, transformers reads as it does.
    """
    transformers_logging.disable_progress_bar()
    kind, config = class_of(info)
    options = {
        "attn_implementation": IMPLEMENTATION,
        "dtype": getattr(torch, info.dtype),
        "device_map": device,
        "output_loading_info": True,
        "local_files_only": True,
    }
    try:
        tensors = _open(info, device)
        if tensors is None:
            model, report = AutoModelForCausalLM.from_pretrained(info.path, **options)
        else:
            options |= {"config": config, "state_dict": tensors}
            model, report = kind.from_pretrained(None, **options)
    except LOAD_ERRORS as error:
        raise ModelError(
            f"cannot load {info.architecture} from {info.path}: {error}"
        ) from error
    if missing := sorted(report["missing_keys"]):
        listed = ", ".join(missing[:3])
        raise ModelError(
            f"{info.path} lacks {len(missing)} weights of its model, such as {listed}"
        )
    return model


def _open(info: ModelInfo, device: str) -> dict[str, Any] | None:
    """Slices of all tensors by name, of which none is read yet; None: others have to read them."""
    config, names = read_config(info.path), named_weights(info.path)
    if "quantization_config" in config or not names:
        return None
    as_it_is = device == "cpu" and stored_dtype(config) == info.dtype
    backend = "mmap" if as_it_is else "pread"
    files = [
        safe_open(info.path / name, framework="pt", backend=backend) for name in names
    ]
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


def fingerprint_model(path: Path) -> str:
    """32 hex digits that stand for a model's config and weights, wherever they lie.

    That of large weights is noted in the user's cache under all that would change with the files:
    where they are, what they are, how large, and when they changed. A note that does not say its
    own name is none.
    """
    config = {k: v for k, v in read_config(path).items() if k not in VOLATILE}
    told = json.dumps(config, sort_keys=True).encode()
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    seen = _look(files)
    note = (
        user_cache() / "fingerprints" / xxh3_128(told + repr(seen).encode()).hexdigest()
    )
    if (known := _read(note)) is not None:
        return known
    state = xxh3_128(told)
    for file in files:
        state.update(file.name.encode())
        with file.open("rb") as stream:
            while data := stream.read(READ_BYTES):
                state.update(data)
    found = state.hexdigest()
    size, changed = sum(x[2] for x in seen), max((at for *_, at in seen), default=0)
    settled = _look(files) == seen and changed + SETTLED_NS < time.time_ns()
    if size >= NOTED_BYTES and settled:
        _write(note, found)
    return found


def _look(files: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Of each file its path, number, size, and when its content and when anything of it changed."""
    looks = [(str(file.resolve()), file.stat()) for file in files]
    return [(at, x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns) for at, x in looks]


def _read(note: Path) -> str | None:
    try:
        known, check = note.read_text().split()
    except (OSError, ValueError):
        return None
    return known if check == _check(note, known) else None


def _write(note: Path, found: str) -> None:
    """All of it or nothing; where nothing can be written it is found again the next time."""
    draft = note.with_suffix(f".{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(f"{found} {_check(note, found)}\n")
        draft.replace(note)
    except OSError:
        draft.unlink(missing_ok=True)


def _check(note: Path, found: str) -> str:
    return xxh3_128(f"{note.name} {found}".encode()).hexdigest()
