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
    command += [
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(out),
        str(ROOT),
    ]
    subprocess.run(command, check=True, cwd=out)
    (archive,) = out.glob("*.whl")
    zipfile.ZipFile(archive).extractall(out / "site")
    return out / "site"


def say(path: Path, cwd: Path) -> list[str]:
    """The file that `disagg` is imported from when `path` comes first, and its CPU backend."""
    code = "import disagg, disagg.protos.v1.kv_transfer_pb2; print(disagg.__file__); "
    code += "from disagg.kernels.cpu.library import backend; print(backend())"
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.check_output(command, cwd=cwd, env=environment, text=True).split()


def test_the_wheel_holds_real_files_and_the_default_model(wheel: Path) -> None:
    for name in (
        "kernels/reference/codes.py",
        "protos/v1/kv_transfer_pb2.py",
        "py.typed",
    ):
        assert (wheel / "disagg" / name).is_file()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        assert (wheel / "disagg/model/default" / name).is_file()

    size = sum(
        path.stat().st_size for path in (wheel / "disagg/model/default").iterdir()
    )

    assert size <= 25e6
    assert not (wheel / "kernels").exists()


@pytest.mark.parametrize(
    ("how", "start"), [("wheel", "root"), ("checkout", "elsewhere")]
)
def test_it_runs_from_any_folder_with_its_library(
    how: str, start: str, wheel, tmp_path
) -> None:
    """The wheel from the folder of the checkout, where another `disagg` and `kernels` lie."""
    path = wheel if how == "wheel" else ROOT
    file, backend = say(path, ROOT if start == "root" else tmp_path)

    assert file == str(path / "disagg" / "__init__.py")
    assert backend.startswith("cpu-") or not (shutil.which("cc") or shutil.which("gcc"))


def test_the_console_script_runs_from_elsewhere(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("disagg")
    output = subprocess.check_output(
        [script, "codecs", "--json"], cwd=tmp_path, text=True
    )

    assert '"kivi"' in output


def test_an_editable_install_runs_from_the_folder_of_its_clone(
    tmp_path: Path,
) -> None:
    """Where `disagg`, the clone, is a folder that could pass for the package."""
    clone, site = tmp_path / "disagg", tmp_path / "site"
    for name in ("disagg", "kernels", "protos"):
        shutil.copytree(
            ROOT / name, clone / name, True, shutil.ignore_patterns("default", "*.so")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = "import setuptools.build_meta as build; build.build_editable('..')"
    environment = {**os.environ, "CC": "false"}  # the library is not asked for
    subprocess.run(
        [sys.executable, "-c", build], check=True, cwd=clone, env=environment
    )
    (archive,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(archive).extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); import disagg.protos.v1"
    subprocess.run([sys.executable, "-ES", "-c", code], check=True, cwd=tmp_path)
