"""The vectors of docs/page-format.md, read by a decoder that knows only that page."""

import ast
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kv import page_format
from tests.kv.page_format import (
    array,
    attend,
    format_of,
    plan_fingerprint,
    read_handoff,
    read_layer,
    state_layouts,
)
from tests.vectors import FOLDER, VECTORS, make_vector

NAMES = [vector.name for vector in VECTORS]


def vector_of(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_page_alone_says_what_a_handoff_means(name):
    vector = vector_of(name)
    layers, heads, n = vector["layers"], vector["heads"], vector["tokens"]
    dim, latent = vector["head_dim"], vector.get("latent")
    fmt = format_of(vector["codec"], dim, vector["dtype"], latent)
    states = state_layouts(vector)
    frames = [base64.b64decode(frame) for frame in vector["frames"]]

    items, commit = read_handoff(fmt, frames, layers, len(states))
    assert commit["tokens"] == n
    plan = plan_fingerprint(fmt, layers, heads, states)
    assert commit["plan"] == vector["plan"] == plan

    queries = array(vector["queries"], -1, dim)
    positions = vector["positions"]
    for layer, meaning in enumerate(vector["meaning"][:layers]):
        k, v = read_layer(fmt, items, layer, heads, n)
        assert_near(k[:, positions], array(meaning["k"], heads, -1, dim), 1e-6)
        value_dim = latent or dim
        assert_near(v[:, positions], array(meaning["v"], heads, -1, value_dim), 1e-6)
        output = array(meaning["output"], -1, value_dim)
        assert_near(attend(queries, k, v), output, 1e-5)
    for layer, layout in enumerate(states, layers):
        block = items["side", layer, 0]
        assert len(block) == layout.nbytes
        for name, (_, shape, _) in layout.planes.items():
            expected = array(vector["meaning"][layer][name], *shape)
            assert np.array_equal(layout.read(block, name), expected)


def assert_near(x: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """No number is off by more than this part of the largest."""
    assert np.abs(x - expected).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit_of_a_frame_is_seen(name):
    for text in vector_of(name)["frames"]:
        frame = bytearray(base64.b64decode(text))
        for place in (5, 20, 40, len(frame) - 1):
            damaged = bytearray(frame)
            damaged[place] ^= 1
            with pytest.raises(AssertionError):
                page_format.read_frame(bytes(damaged))


@pytest.mark.parametrize("vector", VECTORS, ids=NAMES)
def test_the_package_still_writes_these_bytes(vector):
    new = make_vector(vector)
    stored = vector_of(vector.name)

    assert new.keys() == stored.keys()

    for key in ("plan", "codec", "positions", "frames"):
        assert new[key] == stored[key]


def test_the_decoder_knows_nothing_of_the_package():
    tree = ast.parse(Path(page_format.__file__).read_text())
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)

    standard = {
        "base64",
        "struct",
        "collections.abc",
        "dataclasses",
        "hashlib",
        "typing",
    }
    assert modules <= standard | {"msgpack", "numpy", "xxhash"}
