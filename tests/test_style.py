"""How the code reads: how much a line holds, how much a function decides, what names say.

Three measures that pull against each other: packing lines lowers no complexity, splitting functions
lowers no density, and names must say what a value is in either case.
"""

import ast
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("disagg", "kernels", "benchmarks", "training", "tests")
MAX_DENSITY = 11.0  # tokens a code line, of a file
MAX_KERNEL_DENSITY = 14.0  # index arithmetic
MAX_COMPLEXITY = 12  # of a function
MAX_NAMES_SHARE = 0.005  # of all bindings
# participles and pronouns: they say that something came, not what it is
VAGUE_NAMES = {
    "asked",
    "found",
    "given",
    "here",
    "kept",
    "known",
    "left",
    "made",
    "said",
    "seen",
    "some",
    "there",
    "told",
    "wanted",
}
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.STRING,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.Assert,
)


def sources() -> list[Path]:
    """Every Python file that a person wrote."""
    links = [ROOT / "disagg" / "kernels", ROOT / "disagg" / "protos"]
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return [
        path
        for path in paths
        if not path.stem.endswith("_pb2")
        and not any(path.is_relative_to(link) for link in links)
    ]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def density(path: Path) -> float:
    """Tokens a code line; comments, strings and layout are not counted."""
    with path.open() as file:
        tokens = [
            x
            for x in tokenize.generate_tokens(file.readline)
            if x.type not in LAYOUT_TOKENS
        ]
    lines = {token.start[0] for token in tokens}
    return len(tokens) / max(1, len(lines))


def complexity(function: ast.AST) -> int:
    """Paths through a function, of those nested in it apart: McCabe's number."""
    paths = 1
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        if isinstance(node, FUNCTIONS):
            continue
        if isinstance(node, BRANCHES):
            paths += 1
        elif isinstance(node, ast.comprehension):
            paths += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            paths += len(node.values) - 1
        elif isinstance(node, ast.match_case):
            paths += 1
        stack.extend(ast.iter_child_nodes(node))
    return paths


def bindings(tree: ast.AST) -> Iterator[str]:
    """Every name that an assignment, a loop or a signature binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def limit(path: Path) -> float:
    is_kernel = path.is_relative_to(ROOT / "kernels")
    return MAX_KERNEL_DENSITY if is_kernel else MAX_DENSITY


def test_a_line_holds_one_thought():
    dense = [
        f"{path.relative_to(ROOT)}: {density(path):.1f} tokens a code line, at most {limit(path)}"
        for path in sources()
        if density(path) > limit(path)
    ]
    assert not dense, "\n".join(dense)


def test_functions_decide_little():
    branchy = [
        f"{path.relative_to(ROOT)}, {node.name}: {complexity(node)}, at most {MAX_COMPLEXITY}"
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, FUNCTIONS) and complexity(node) > MAX_COMPLEXITY
    ]
    assert not branchy, "\n".join(branchy)


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_say_what_a_value_is(folder):
    names = [
        (name, path)
        for path in sources()
        if path.is_relative_to(ROOT / folder)
        for name in bindings(tree_of(path))
    ]
    vague = [
        f"{path.relative_to(ROOT)}: {name}"
        for name, path in names
        if name in VAGUE_NAMES
    ]

    assert len(vague) <= MAX_NAMES_SHARE * len(names), "\n".join(vague)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(): return 1", 1),
        ("def f(x): return x if x else 0", 2),
        ("def f(xs): return [x for x in xs if x and x > 1]", 4),
        ("def f(x):\n    while x:\n        x -= 1", 2),
    ],
)
def test_complexity_counts_paths(code, expected):
    assert complexity(ast.parse(code).body[0]) == expected
