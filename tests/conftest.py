"""Shared by all tests: which files run side by side, one torch thread, Triton, a model."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # the suite shares its cores
# no deadline: a busy machine is no failure; derandomized: every run tries the same examples
settings.register_profile("untimed", deadline=None, derandomize=False)
settings.load_profile("untimed")

GPU = re.compile(r"^@pytest\.mark\.gpu$", re.MULTILINE)
# files that never run side by side: they start Ray, create namespaces or build in the checkout
SERIAL = {
    "tests/bench/test_child.py",
    "tests/bench/test_link.py",
    "tests/benchmarks/test_chaos.py",
    "tests/benchmarks/test_hung_workers.py",
    "tests/benchmarks/test_moves.py",
    "tests/cli/test_cluster.py",
    "tests/cli/test_doors.py",
    "tests/cli/test_drain.py",
    "tests/cli/test_group_service.py",
    "tests/cli/test_hybrid_service.py",
    "tests/cli/test_private.py",
    "tests/cluster/test_ray_users.py",
    "tests/cluster/test_serve_replicas.py",
    "tests/test_packaging.py",
}
# files that start early, so that no process is left alone with one at the end
LONG = {
    "tests/benchmarks/test_gpu.py",
    "tests/benchmarks/test_machine_code.py",
    "tests/engine/test_all_codecs.py",
    "tests/engine/test_engine.py",
    "tests/kernels/test_launch_path.py",
}


def scope_of(nodeid: str) -> str:
    """One process runs all tests of a scope: a file, with its fixtures and caches, or SERIAL."""
    file = nodeid.partition("::")[0]
    return "serial" if file in SERIAL else file


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` looks at no other files: a machine with a GPU may have no Ray and no web server."""
    if config.option.markexpr != "gpu":
        return None
    alone = collection_path.is_file()
    files = [collection_path] if alone else collection_path.rglob("test_*.py")
    marked = any(GPU.search(x.read_text()) for x in files)
    return None if marked else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ray") and scope_of(item.nodeid) != "serial":
            raise pytest.UsageError(f"{item.nodeid} needs Ray; name its file in SERIAL")

    def starts_late(item: pytest.Item) -> bool:
        scope = scope_of(item.nodeid)
        return scope != "serial" and scope not in LONG

    items.sort(key=starts_late)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: scopes by hand, since pytest 9.2 and xdist 3.8 lose xdist_group (2026-11)."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder for state files, so that no test meets a service that the user runs."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def quiet_logging() -> Iterator[None]:
    """The loggers as before: `disagg serve` sets them up for its process."""
    root = logging.getLogger()
    package = logging.getLogger("disagg")
    handlers, level, package_level = root.handlers[:], root.level, package.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    package.setLevel(package_level)


@pytest.fixture
def disagg(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command, expects its exit code, and returns its output.

    The first argument may hold several words.
    """
    from disagg.cli.app import run

    def output_of(words: str, *arguments: object, code: int = 0) -> Any:
        exit_code = run([*words.split(), *map(str, arguments)])
        assert exit_code == code
        return capsys.readouterr()

    return output_of


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random llama with a tokenizer of bytes, saved."""
    from tests.model.tiny import save_tiny  # imports transformers, which few runs need

    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), head_dim=64)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Small random models whose layers keep states, by architecture; each is loaded once."""
    from disagg.model.runner import Runner
    from tests.model.tiny import save_tiny

    @cache
    def load(kind: str) -> Any:
        return Runner.load(str(save_tiny(kind, tmp_path_factory.mktemp(kind))))

    return load


@pytest.fixture(scope="session")
def runner(tiny: Path) -> Any:
    """That model, loaded once."""
    from disagg.model.runner import Runner

    return Runner.load(str(tiny))
