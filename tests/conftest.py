"""Shared by all tests: what runs beside what, coroutines, one torch thread, Triton, a model."""

import asyncio
import inspect
import os
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # the suite shares its cores
# a busy machine is no failure, and no two runs try the same, those of CI included
settings.register_profile("untimed", deadline=None, derandomize=False)
settings.load_profile("untimed")

GPU = re.compile(r"^@pytest\.mark\.gpu$", re.MULTILINE)
SERIAL = {  # never beside each other: what starts Ray, makes namespaces or builds in the checkout
    "tests/bench/test_crew.py",
    "tests/bench/test_child.py",
    "tests/cli/test_cluster.py",
    "tests/cli/test_private.py",
    "tests/cluster/test_ray_users.py",
    "tests/test_packaging.py",
}
LONG = {  # begun early, so that no process is left alone with one at the end
    "tests/benchmarks/test_gpu.py",
    "tests/bench/test_machine_code.py",
    "tests/engine/test_all_codecs.py",
    "tests/engine/test_engine.py",
    "tests/kernels/test_launch_path.py",
}


def scope_of(nodeid: str) -> str:
    """A file is one process's, with its fixtures and caches; all of SERIAL is one process's too."""
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
    items.sort(key=lambda item: (scope := scope_of(item.nodeid)) != "serial" and scope not in LONG)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on a loop of its own, inside what it is given to enter."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        async with AsyncExitStack() as stack:
            given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            for name, value in given.items():
                if isinstance(value, AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**given)

    asyncio.run(run())
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`. Marks of xdist_group are lost with pytest 9.2 and xdist 3.8 (2026-11)."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder for state files: no test meets the service that its user runs."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("run"))


@pytest.fixture
def disagg(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command says, once it has ended with the code; its first words may be one string."""
    from disagg.cli.app import run

    def said(words: str, *more: object, code: int = 0) -> Any:
        assert run([*words.split(), *map(str, more)]) == code
        return capsys.readouterr()

    return said


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random llama with a tokenizer of bytes, saved."""
    from tests.model.tiny import save_tiny  # transformers: not every run needs it

    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), head_dim=64)


@pytest.fixture(scope="session")
def runner(tiny: Path) -> Any:
    """That model, loaded once."""
    from disagg.model.runner import Runner

    return Runner.load(str(tiny))
