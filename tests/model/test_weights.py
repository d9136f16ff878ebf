"""Weights are in memory once, and a fingerprint that was noted is never that of other weights."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import PreTrainedModel

from disagg.model import weights
from disagg.model.describe import describe_model, fetched_folder, user_cache
from disagg.model.weights import fingerprint_model, load_model
from tests.model.tiny import save_tiny

LOAD = """
from disagg.model.describe import describe_model
from disagg.model.weights import load_model
from transformers.models.llama import modeling_llama

def peak():
    (line,) = [x for x in open("/proc/self/status") if x.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

info = describe_model("smollm2", "{dtype}")
open("/proc/self/clear_refs", "w").write("5")
before = peak()
model = load_model(info, "cpu")
total = sum(float(x.sum()) for x in model.parameters())  # mapped weights are there once touched
print((peak() - before) / sum(x.nbytes for x in model.parameters()))
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "NOTED_BYTES", 0)
    return save_tiny("llama", tmp_path)


@pytest.fixture
def opened(monkeypatch):
    """The files whose content was read for a fingerprint."""
    monkeypatch.setattr(weights, "SETTLED_NS", 0)
    names = []
    path_type = type(user_cache())
    read = path_type.open

    def note(self, *args, **options):
        names.append(self.name)
        return read(self, *args, **options)

    monkeypatch.setattr(path_type, "open", note)
    return lambda: names.count("model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_the_checkpoints_in_any_dtype(path, dtype):
    stored = dict(
        load_model(describe_model(str(path), "float32"), "cpu").named_parameters()
    )
    for name, x in load_model(
        describe_model(str(path), dtype), "cpu"
    ).named_parameters():
        assert torch.equal(x, stored[name].to(getattr(torch, dtype)))


def test_weights_in_several_files_are_all_loaded(path):
    whole = load_model(describe_model(str(path)), "cpu")
    (path / "model.safetensors").unlink()

    whole.save_pretrained(path, max_shard_size="40KB")

    assert len(list(path.glob("*.safetensors"))) > 2

    parts = dict(load_model(describe_model(str(path)), "cpu").named_parameters())

    assert all(torch.equal(x, parts[name]) for name, x in whole.named_parameters())


def test_weights_are_read_once_for_all_their_fingerprints(path, opened):
    fingerprints = [fingerprint_model(path) for _ in range(3)]

    assert opened() == 1
    assert len(set(fingerprints)) == 1


def test_a_file_that_is_not_read_leaves_the_fingerprint(path):
    before = fingerprint_model(path)

    (path / "consolidated.safetensors").write_bytes(b"of another loader")

    assert fingerprint_model(path) == before


def test_changed_weights_of_equal_size_change_the_fingerprint(path, opened):
    file, before = path / "model.safetensors", fingerprint_model(path)
    data, times = bytearray(file.read_bytes()), file.stat()
    data[-1] ^= 1
    file.write_bytes(data)

    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert fingerprint_model(path) != before
    assert opened() > 1


@pytest.mark.parametrize(
    "damage", [b"", b"0" * 32, b"0" * 32 + b" " + b"1" * 32, b"\xff"]
)
def test_a_damaged_note_is_none(path, opened, damage):
    before = fingerprint_model(path)
    (note,) = (user_cache() / "fingerprints").iterdir()

    note.write_bytes(damage)

    assert fingerprint_model(path) == before
    assert fingerprint_model(path) == before
    assert opened() == 2


def test_weights_that_changed_a_moment_ago_are_read_again(path):
    fingerprint_model(path)
    assert not (user_cache() / "fingerprints").exists()


@pytest.mark.model
@pytest.mark.skipif(
    not fetched_folder("smollm2").is_dir(), reason="SmolLM2 is not here"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loading_takes_the_memory_of_the_weights_and_little_more(dtype):
    code = [sys.executable, "-c", LOAD.format(dtype=dtype)]
    process = subprocess.run(code, capture_output=True, text=True, check=True)

    assert 0.9 < float(process.stdout.split()[-1]) < 1.15


def test_nothing_is_noted_of_small_weights(path, monkeypatch):
    monkeypatch.setattr(weights, "SETTLED_NS", 0)
    monkeypatch.setattr(weights, "NOTED_BYTES", 1 << 30)

    fingerprint_model(path)

    assert not (user_cache() / "fingerprints").exists()


def test_threads_that_load_models_at_once_leave_transformers_as_it_was(tmp_path):
    info = describe_model(str(save_tiny("llama", tmp_path, tie_word_embeddings=True)))
    before = PreTrainedModel.tie_weights

    with ThreadPoolExecutor(8) as pool:
        models = [*pool.map(lambda _: load_model(info, "cpu"), range(64))]

    assert PreTrainedModel.tie_weights is before
    assert all(x.lm_head.weight is x.get_input_embeddings().weight for x in models)
