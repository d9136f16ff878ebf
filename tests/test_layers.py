"""The map of the house: imports point down, and packages stay in their rooms.

A module imports only from floors below its own; lazy imports count too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [  # bottom to top; rooms on one floor do not know each other
    {"errors", "kernels", "log", "protos"},
    {"config"},
    {"kv", "parsers"},
    {"codecs", "wire", "grammar"},
    {"paged"},
    {"model", "transfer"},
    {"engine"},
    {"router", "worker"},
    {"launch"},
    {"server", "llm"},
    {"bench", "eval", "report", "serve_app"},
    {"cli"},
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
THIRD_PARTY = {  # package: where alone it may be imported
    "ray": [
        "disagg/launch/ray_connection.py",  # starts and joins Ray
        "disagg/launch/shared_facts.py",  # Ray's key-value store
        "disagg/launch/actors.py",  # starts actors and calls them
        "disagg/launch/rank_bundles.py",  # placement groups
        "disagg/launch/ray_actor.py",  # runs as an actor
        "disagg/launch/rank_actor.py",  # so do the other ranks of a worker
        "disagg/serve_app.py",
    ],
    "transformers": ["disagg/model/"],
    "grpc": ["disagg/transfer/", "protos/"],
    "cryptography": ["disagg/transfer/certificates.py"],
    "fastapi": ["disagg/server/"],
    "starlette": ["disagg/server/", "disagg/serve_app.py"],
    "uvicorn": ["disagg/server/"],
    "pydantic": ["disagg/server/"],
    "prometheus_client": ["disagg/server/"],
    "opentelemetry": ["disagg/server/spans.py"],
    "triton": ["kernels/gpu/"],
    "matplotlib": ["disagg/report/"],
    "llguidance": ["disagg/grammar/"],
    "typer": ["disagg/cli"],
}
MAX_FUNCTION = 60  # lines of the body
TORCH_FREE = {"errors", "config", "grammar", "kv", "wire", "transfer", "cli"}


def sources() -> list[Path]:
    paths = [*(ROOT / "disagg").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    links = (ROOT / "disagg" / "kernels", ROOT / "disagg" / "protos")
    return [
        path for path in paths if not any(path.is_relative_to(link) for link in links)
    ]


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "kernels" else parts[1]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "disagg" else ("disagg", *parts)).removesuffix(
        ".__init__"
    )


def imports(path: Path, for_types: bool = True) -> Iterator[str]:
    """Modules, and what is taken from them, which may be modules too."""
    typing_only = set() if for_types else imports_for_types(path)
    for node in nodes(path):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole address"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imports_for_types(path: Path) -> set[ast.AST]:
    """What stands below `if TYPE_CHECKING`."""
    blocks = [
        node
        for node in nodes(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {statement for block in blocks for statement in block.body}


def imported_rooms(path: Path) -> Iterator[str]:
    for module in imports(path):
        first, *rest = module.split(".")
        if first == "disagg" and rest:
            yield rest[0]


def test_imports_point_down():
    wrong = []
    for path in sources():
        importer = room(path)
        for imported in imported_rooms(path):
            has_floors = importer in FLOOR and imported in FLOOR
            if not has_floors or imported == importer:
                continue
            if FLOOR[imported] >= FLOOR[importer]:
                wrong.append(f"{path.relative_to(ROOT)} imports {imported}")

    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    """Inside a room too. Imports for types alone are not executed."""
    imported = {module(path): {*imports(path, for_types=False)} for path in sources()}
    graph = {name: names & imported.keys() for name, names in imported.items()}
    TopologicalSorter(graph).prepare()


def test_every_room_has_a_floor():
    assert {room(path) for path in sources()} - {"__init__", "__main__"} <= set(FLOOR)


def test_third_party_packages_stay_in_their_rooms():
    wrong = []
    for path in sources():
        file = str(path.relative_to(ROOT))
        for module in imports(path):
            rooms = THIRD_PARTY.get(module.split(".")[0])
            if rooms and not file.startswith(tuple(rooms)):
                wrong.append(f"{file} imports {module}")

    assert not wrong, "\n".join(wrong)


def test_rooms_below_the_model_import_no_torch():
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        if room(path) in TORCH_FREE
        and any(m.split(".")[0] == "torch" for m in imports(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("start", ["root", "elsewhere"])
def test_the_kernels_folder_never_hides_the_package_of_that_name(start, tmp_path):
    """transformers asks find_spec("kernels"); a regular package of ours would answer."""
    code = "import importlib.util as u; s = u.find_spec('kernels'); "
    code += "assert s is None or s.origin is None, s; import disagg.kernels.formats"
    cwd = ROOT if start == "root" else tmp_path
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    subprocess.run([sys.executable, "-c", path + code], cwd=cwd, check=True)


def written(*folders: str) -> list[Path]:
    """Every *.py of these folders that a person wrote."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [path for path in paths if not path.stem.endswith(("_pb2", "_pb2_grpc"))]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Every function, and the lines of its body without the docstring."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            body = node.body[1:] if has_docstring else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            yield node.name, lines


def test_functions_fit_a_screen():
    wrong = [
        f"{path.relative_to(ROOT)}, {name}: {length}"
        for path in [*sources(), *written("training")]
        for name, length in functions(path)
        if length > MAX_FUNCTION
    ]
    assert not wrong, "\n".join(wrong)


def test_no_class_has_a_name_twice():
    places: dict[str, list[str]] = {}
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))

    twice = {name: files for name, files in places.items() if len(files) > 1}

    assert not twice
