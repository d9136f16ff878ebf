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
)
from tests.vectors import FOLDER, VECTORS, make_vector

NAMES = [vector.name for vector in VECTORS]


def vector_of(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_page_alone_says_what_a_handoff_means(name):
    told = vector_of(name)
    layers, heads, dim, n = (told[x] for x in ("layers", "heads", "head_dim", "tokens"))
    fmt = format_of(told["codec"], dim, told["dtype"])
    frames = [base64.b64decode(frame) for frame in told["frames"]]
    items, commit = read_handoff(fmt, frames, layers)
    assert commit["tokens"] == n
    assert commit["plan"] == told["plan"] == plan_fingerprint(fmt, layers, heads)
    queries = array(told["queries"], -1, dim)
    for layer, meant in enumerate(told["meaning"]):
        k, v = read_layer(fmt, items, layer, heads, n)
        for x, name in ((k, "k"), (v, "v")):
            expected = array(meant[name], heads, -1, dim)
            assert (
                np.abs(x[:, told["positions"]] - expected).max()
                <= 1e-6 * np.abs(expected).max()
            )
        output = array(meant["output"], -1, dim)
        assert (
            np.abs(attend(queries, k, v) - output).max() <= 1e-5 * np.abs(output).max()
        )


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
    made, told = make_vector(vector), vector_of(vector.name)
    assert made.keys() == told.keys()
    for key in ("plan", "codec", "positions", "frames"):
        assert made[key] == told[key]


def test_the_decoder_knows_nothing_of_the_package():
    tree = ast.parse(Path(page_format.__file__).read_text())
    modules = [
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    ]
    modules += [
        x.name for n in ast.walk(tree) if isinstance(n, ast.Import) for x in n.names
    ]
    known = {"base64", "struct", "collections.abc", "dataclasses", "hashlib", "typing"}
    assert {*modules} <= known | {"msgpack", "numpy", "xxhash"}
