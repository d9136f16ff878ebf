"""The map of the house: imports point down, packages stay in their rooms, files stay small.

A module imports only from floors below its own; lazy imports count too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [  # bottom to top; rooms on one floor do not know each other
    {"errors", "kernels", "protos"},
    {"config", "metrics"},
    {"page"},
    {"plan"},
    {"state"},
    {"codecs", "pool", "wire"},
    {"model", "transfer"},
    {"engine"},
    {"workers"},
    {"server", "llm"},
    {"bench", "eval", "report"},
    {"cli"},
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
THIRD_PARTY = {  # package: where alone it may be imported
    "ray": ["disagg/workers/launch.py"],
    "transformers": ["disagg/model/"],
    "grpc": ["disagg/transfer/", "protos/"],
    "hpack": ["disagg/transfer/"],
    "hyperframe": ["disagg/transfer/"],
    "fastapi": ["disagg/server/"],
    "starlette": ["disagg/server/"],
    "uvicorn": ["disagg/server/"],
    "pydantic": ["disagg/server/"],
    "triton": ["kernels/"],
    "matplotlib": ["disagg/report/"],
    "typer": ["disagg/cli"],
}
MAX_FILE, MAX_FUNCTION = 250, 60  # lines; a docstring does not count against a function
TORCH_FREE = {
    "errors",
    "config",
    "metrics",
    "page",
    "plan",
    "state",
    "pool",
    "wire",
    "transfer",
    "cli",
}


def sources() -> list[Path]:
    found = [*(ROOT / "disagg").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    links = (ROOT / "disagg" / "kernels", ROOT / "disagg" / "protos")
    return [path for path in found if not any(path.is_relative_to(link) for link in links)]


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "kernels" else parts[1]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; here the whole address is written"
            module = node.module or ""
            yield from [f"disagg.{a.name}" for a in node.names] if module == "disagg" else [module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported_rooms(path: Path) -> Iterator[str]:
    for module in imports(path):
        first, *rest = module.split(".")
        if first == "disagg" and rest:
            yield rest[0]


def test_imports_point_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {there}"
        for path in sources()
        if (here := room(path)) in FLOOR
        for there in imported_rooms(path)
        if there in FLOOR and there != here and FLOOR[there] >= FLOOR[here]
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in sources()} - {"__init__", "__main__"} <= set(FLOOR)


def test_third_party_packages_stay_in_their_rooms() -> None:
    wrong = [
        f"{where} imports {module}"
        for path in sources()
        if (where := str(path.relative_to(ROOT)))
        for module in imports(path)
        if (rooms := THIRD_PARTY.get(module.split(".")[0]))
        and not any(where.startswith(allowed) for allowed in rooms)
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_below_the_model_import_no_torch() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        if room(path) in TORCH_FREE and any(m.split(".")[0] == "torch" for m in imports(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("start", ["root", "elsewhere"])
def test_the_kernels_folder_never_hides_the_package_of_that_name(
    start: str, tmp_path: Path
) -> None:
    """transformers asks find_spec("kernels"); a regular package of ours would answer."""
    code = (
        "import importlib.util as u; s = u.find_spec('kernels'); "
        "assert s is None or s.origin is None, s; import disagg.kernels.formats"
    )
    cwd = ROOT if start == "root" else tmp_path
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    subprocess.run([sys.executable, "-c", path + code], cwd=cwd, check=True)


@pytest.mark.parametrize(
    "path",
    [path for path in sources() if not path.stem.endswith(("_pb2", "_pb2_grpc"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_and_functions_fit_a_screen_or_two(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            docstring = ast.get_docstring(node, clean=False) or ""
            assert length - len(docstring.splitlines()) <= MAX_FUNCTION, node.name
