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
NOTED_BYTES = 64 << 20  # smaller weights are read as fast as a note
SETTLED_NS = (
    2 * 10**9
)  # files that changed just now may change again within a tick of clocks
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
    """The model of a folder on a device; ModelError if weights are missing or cannot be read.

    Other files than safetensors, and quantized ones, are read by transformers.
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
            model, report = kind.from_pretrained(
                None, config=config, state_dict=tensors, **options
            )
    except LOAD_ERRORS as error:
        raise ModelError(
            f"cannot load {info.architecture} from {info.path}: {error}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        examples = ", ".join(missing[:3])
        raise ModelError(
            f"{info.path} lacks {len(missing)} weights of its model, such as {examples}"
        )
    return model


def _open(info: ModelInfo, device: str) -> dict[str, Any] | None:
    """Slices of all tensors by name, none read yet; None: transformers has to read the files."""
    config = read_config(info.path)
    names = named_weights(info.path)
    if "quantization_config" in config or not names:
        return None
    needs_no_conversion = (
        device == "cpu" and stored_dtype(config, info.path) == info.dtype
    )
    backend = "mmap" if needs_no_conversion else "pread"
    files = [
        safe_open(info.path / name, framework="pt", backend=backend) for name in names
    ]
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


def fingerprint_model(path: Path) -> str:
    """32 hex digits that stand for a model's config and weights, in whichever folder they are.

    The fingerprint of large weights is noted in the user's cache. The name of the note is a digest
    of the config and of the files' paths, numbers, sizes and times; a note that does not repeat its
    own name is ignored.
    """
    config = {k: v for k, v in read_config(path).items() if k not in VOLATILE}
    config_bytes = json.dumps(config, sort_keys=True).encode()
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    stats = _stat_all(files)
    note_name = xxh3_128(config_bytes + repr(stats).encode()).hexdigest()
    note = user_cache() / "fingerprints" / note_name
    fingerprint = _read_note(note)
    if fingerprint is not None:
        return fingerprint
    fingerprint = _digest(config_bytes, files)
    nbytes = sum(size for _, _, size, _, _ in stats)
    changed_ns = max((ctime_ns for *_, ctime_ns in stats), default=0)
    is_settled = changed_ns + SETTLED_NS < time.time_ns()
    if nbytes >= NOTED_BYTES and is_settled and _stat_all(files) == stats:
        _write_note(note, fingerprint)
    return fingerprint


def fingerprint_with(fingerprint: str, context: int) -> str:
    """The fingerprint of a model whose rotary frequencies are those of a context."""
    return xxh3_128(f"{fingerprint} {context}".encode()).hexdigest()


def _digest(config: bytes, files: Sequence[Path]) -> str:
    """The digest of a config, and of the names and contents of files."""
    state = xxh3_128(config)
    for file in files:
        state.update(file.name.encode())
        with file.open("rb") as stream:
            while data := stream.read(READ_BYTES):
                state.update(data)
    return state.hexdigest()


def _stat_all(files: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Of each file its path, number, size, and the times its content and its inode changed."""
    stats = []
    for file in files:
        path = str(file.resolve())
        x = file.stat()
        stats.append((path, x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns))
    return stats


def _read_note(note: Path) -> str | None:
    try:
        fingerprint, check = note.read_text().split()
    except (OSError, ValueError):
        return None
    return fingerprint if check == _check(note, fingerprint) else None


def _write_note(note: Path, fingerprint: str) -> None:
    """Write all of it or nothing; without a note the next load reads the weights again."""
    draft = note.with_suffix(f".{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(f"{fingerprint} {_check(note, fingerprint)}\n")
        draft.replace(note)
    except OSError:
        draft.unlink(missing_ok=True)


def _check(note: Path, fingerprint: str) -> str:
    return xxh3_128(f"{note.name} {fingerprint}".encode()).hexdigest()
