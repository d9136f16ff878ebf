"""Weights: from files to a model on its device, once in memory; and the fingerprint of the files.

stored as it is computed, on a CPU     the mapped files are the weights
anything else                          tensor by tensor: read, converted, uploaded, let go
packed, in few bits a number           unpacked to the model's dtype, one at a time
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from xxhash import xxh3_128

from disagg.errors import ModelError
from disagg.model.architecture import building
from disagg.model.capacity import class_of
from disagg.model.describe import (
    ModelInfo,
    named_weights,
    read_config,
    stored_dtype,
    user_cache,
)
from disagg.model.json_file import read_object
from disagg.model.loading import (
    LOAD_ERRORS,
    build_model,
    check_report,
    load_error,
    load_options,
    stays_packed,
)
from disagg.model.packed.tables import PackedWeight
from disagg.model.quantization import MODELOPT_FILE
from disagg.model.rank_group import RankGroup
from disagg.model.shards import (
    check_ranks,
    join_ranks,
    local_config,
    plan_of,
    shard_tensors,
)
from disagg.model.storage import Storage, read_storage

READ_BYTES = 16 << 20
NOTED_BYTES = 64 << 20  # smaller weights are read as fast as a note
SETTLED_NS = (
    2 * 10**9
)  # files that changed just now may change again within a tick of clocks
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def load_model(
    info: ModelInfo, device: str, group: RankGroup | None = None
) -> PreTrainedModel:
    """The model of a folder on a device; ModelError if weights are missing or cannot be read.

    Packed weights are unpacked, unless a kernel of transformers multiplies them on this machine.
    Files other than safetensors are read by transformers.

    group: the ranks that divide the model; None: it is whole
    """
    kind, config = class_of(info)
    storage = read_storage(info.path)
    if group is not None:
        return _load_shard(info, device, group, storage)
    if storage is not None and not stays_packed(storage.quantization, device, config):
        tensors = _open(info, storage, device)
        model = build_model(kind, config, tensors, info, device)
        if device == "cuda":
            torch.cuda.empty_cache()  # memory for unpacking counts against the arena
        return model
    try:
        with building():
            model, report = kind.from_pretrained(
                info.path, config=config, **load_options(info, device)
            )
    except LOAD_ERRORS as error:
        raise load_error(info, error) from error
    check_report(report, info)
    return model


def _load_shard(
    info: ModelInfo, device: str, group: RankGroup, storage: Storage | None
) -> PreTrainedModel:
    """The part of a model that this rank has; its forward pass is one of all ranks."""
    kind, config = class_of(info)
    check_ranks(config, info, group.ranks)
    if storage is None:
        raise ModelError(
            f"{info.path} has no safetensors files; {group.ranks} ranks read slices of them"
        )
    if stays_packed(storage.quantization, device, config):
        raise ModelError(
            f"{info.path} is multiplied without unpacking on this GPU, which one rank does; "
            f"ranks are {group.ranks}"
        )
    plan = plan_of(config)
    tensors = shard_tensors(_open(info, storage, device), plan, group.rank, group.ranks)
    config = local_config(config, info, group.ranks)
    model = build_model(kind, config, tensors, info, device)
    join_ranks(model, plan, group)
    return model


def _open(info: ModelInfo, storage: Storage, device: str) -> dict[str, Any]:
    """All weights by name, as slices of files, none read yet."""
    is_stored = stored_dtype(read_config(info.path), info.path) == info.dtype
    backend = "mmap" if device == "cpu" and is_stored else "pread"
    try:
        files = {
            name: safe_open(info.path / name, framework="pt", backend=backend)
            for name in named_weights(info.path)
        }
    except LOAD_ERRORS as error:
        raise load_error(info, error) from error
    slices = {
        name: files[header.file].get_slice(name)
        for name, header in storage.headers.items()
    }
    tensors = {name: slices[name] for name in storage.plain}
    lock = Lock()
    for weight in storage.packed:
        parts = {part: slices[name] for part, name in weight.parts.items()}
        tensors[weight.name] = PackedSlice(weight, parts, info.dtype, device, lock)
    return tensors


class PackedSlice:
    """A packed weight, unpacked when transformers reads it as a slice of a file.

    One weight at a time, so that the packed numbers of only one are in memory besides the model.
    """

    def __init__(
        self,
        weight: PackedWeight,
        parts: Mapping[str, Any],
        dtype: str,
        device: str,
        lock: Lock,
    ):
        self._weight = weight
        self._parts = parts
        self._dtype = getattr(torch, dtype)
        self._device = device
        self._lock = lock

    def __getitem__(self, _: object) -> Tensor:
        shape = self._weight.shape
        with self._lock, torch.no_grad():
            parts = {
                part: stored[...].to(self._device)
                for part, stored in self._parts.items()
            }
            out = torch.empty(shape, dtype=self._dtype, device=self._device)
            try:
                self._weight.unpack(parts, out)
            except (IndexError, RuntimeError, ValueError) as error:
                name = self._weight.name
                raise ModelError(f"{name} cannot be unpacked: {error}") from error
        return out


def fingerprint_model(path: Path) -> str:
    """32 hex digits that stand for a model's config and weights, in whichever folder they are.

    The fingerprint of large weights is noted in the user's cache. The name of the note is a digest
    of the config and of the files' paths, numbers, sizes and times; a note that does not repeat its
    own name is ignored.
    """
    config = {k: v for k, v in read_config(path).items() if k not in VOLATILE}
    packing = read_object(path / MODELOPT_FILE)
    settings = {**config, MODELOPT_FILE: packing} if packing else config
    config_bytes = json.dumps(settings, sort_keys=True).encode()
    files = [path / name for name in named_weights(path)]
    files = files or sorted(path.glob("*.bin"))
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


def fingerprint_with(fingerprint: str, change: object) -> str:
    """The fingerprint of a model that computes other keys than its files say.

    change: the context whose rotary frequencies it has, or what its weights are rounded to
    """
    return xxh3_128(f"{fingerprint} {change}".encode()).hexdigest()


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
