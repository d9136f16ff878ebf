"""The package runs as a wheel, as an editable install and from a checkout, from any folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, unpacked as an installer would."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(ROOT)]
    subprocess.run(command, check=True, cwd=out)
    (archive,) = out.glob("*.whl")
    zipfile.ZipFile(archive).extractall(out / "site")
    return out / "site"


def where(path: Path, cwd: Path) -> str:
    """The folder that `disagg` is imported from when `path` comes first."""
    code = (
        "import disagg, disagg.protos.v1.kv_transfer_pb2, disagg.kernels.reference.codes; "
        "print(disagg.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, cwd=cwd, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_wheel_holds_real_files_and_the_default_model(wheel: Path) -> None:
    for name in ("kernels/reference/codes.py", "protos/v1/kv_transfer_pb2.py", "py.typed"):
        assert (wheel / "disagg" / name).is_file()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        assert (wheel / "disagg/model/default" / name).is_file()
    size = sum(path.stat().st_size for path in (wheel / "disagg/model/default").iterdir())
    assert size <= 25e6
    assert not (wheel / "kernels").exists()


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler")
def test_the_wheel_holds_the_library_of_a_cpu(wheel: Path) -> None:
    code = "from disagg.kernels.cpu.library import backend; print(backend())"
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=wheel, env=environment, check=True, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.stdout.startswith("cpu-")


@pytest.mark.parametrize("start", ["root", "elsewhere"])
@pytest.mark.parametrize("how", ["wheel", "checkout"])
def test_it_runs_from_any_folder(how: str, start: str, wheel: Path, tmp_path: Path) -> None:
    path = wheel if how == "wheel" else ROOT
    cwd = ROOT if start == "root" else tmp_path
    assert where(path, cwd) == str(path / "disagg" / "__init__.py")


def test_the_console_script_runs_from_elsewhere(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("disagg")
    done = subprocess.run(
        [script, "codecs", "--json"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert '"kivi"' in done.stdout
