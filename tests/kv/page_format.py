"""Reads hand-offs as docs/page-format.md tells it, and knows nothing else: no line of the package.

numpy for arrays, msgpack and xxhash because the page names them.
"""

import base64
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np
from xxhash import xxh3_64_intdigest

RAW_TOKENS = 16
SIZES = {"uint8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}
BANDS = {3: ((4, 2), (2, 2)), 2: ((4, 1), (2, 2), (0, 1))}  # bits, quarters of D
KINDS = ("segment", "page", "side", "raw")

Array = np.ndarray


def fingerprint(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=8).hexdigest()


def align(size: int) -> int:
    return -(-size // 16) * 16


@dataclass(frozen=True)
class Layout:
    """Planes: name -> (dtype, shape, offset)."""

    spec: str
    kind: str
    tokens: int
    planes: Mapping[str, tuple[str, tuple[int, int], int]]
    nbytes: int

    @classmethod
    def of(
        cls, spec: str, kind: str, tokens: int, planes: list[tuple[str, str, Any]]
    ) -> "Layout":
        placed, end = {}, 0
        for name, dtype, shape in planes:
            placed[name] = dtype, shape, align(end)
            end = align(end) + SIZES[dtype] * shape[0] * shape[1]
        return cls(spec, kind, tokens, placed, align(end))

    @property
    def fingerprint(self) -> str:
        told = tuple(
            f"Plane(name={name!r}, dtype={dtype!r}, shape={shape}, offset={offset})"
            for name, (dtype, shape, offset) in self.planes.items()
        )
        return fingerprint((1, self.spec, self.kind, self.tokens, self.nbytes, told))

    def read(self, block: bytes, name: str) -> Array:
        dtype, shape, offset = self.planes[name]
        return read_plane(block, dtype, shape, offset)


def read_plane(
    data: bytes, dtype: str, shape: tuple[int, int], offset: int = 0
) -> Array:
    count = shape[0] * shape[1]
    if dtype == "bfloat16":
        words = np.frombuffer(data, "<u2", count, offset).astype(np.uint32) << 16
        return words.view(np.float32).reshape(shape)
    name = {"int16": "<u2", "uint8": "u1", "float16": "<f2", "float32": "<f4"}[dtype]
    return np.frombuffer(data, name, count, offset).reshape(shape)


def raw_layout(dtype: str, head_dim: int) -> Layout:
    shape = (RAW_TOKENS, head_dim)
    return Layout.of(
        f"raw:dtype={dtype}", "raw", 16, [("k", dtype, shape), ("v", dtype, shape)]
    )


@dataclass(frozen=True)
class Format:
    name: str
    options: Mapping[str, str]
    head_dim: int
    page: Layout
    raw: Layout
    sink: int = 0
    residual: int = 0
    segment: Layout | None = None
    side: Layout | None = None

    def sealed(self, n: int) -> int:
        tokens = self.page.tokens
        return tokens * (max(0, n - self.sink - self.residual) // tokens)

    def counts(self, n: int) -> dict[str, int]:
        """Records of each kind, in the order of items."""
        sealed = self.sealed(n)
        segments = -(-sealed // self.segment.tokens) if self.segment else 0
        side = int(self.side is not None and not sealed)
        raws = -(-(n - sealed) // RAW_TOKENS)
        return dict(
            zip(KINDS, (segments, sealed // self.page.tokens, side, raws), strict=True)
        )

    def layouts(self) -> dict[str, Layout]:
        found = {
            "page": self.page,
            "raw": self.raw,
            "segment": self.segment,
            "side": self.side,
        }
        return {kind: layout for kind, layout in found.items() if layout}


def format_of(spec: str, head_dim: int, dtype: str) -> Format:
    name, _, rest = spec.partition(":")
    options = dict(item.split("=") for item in rest.split(","))
    if name == "raw":
        named = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[
            options["dtype"]
        ]
        raw = raw_layout(named, head_dim)
        return Format(name, options, head_dim, raw, raw)
    raw = raw_layout(dtype if dtype in ("float16", "bfloat16") else "float16", head_dim)
    if name == "kivi":
        bits, group = int(options["bits"]), int(options["group"])
        halves = 4 // bits
        k, v = (64 // group, head_dim), (head_dim // group, 64)
        planes: list[tuple[str, str, Any]] = [
            ("k_codes", "int16", (16, head_dim // halves)),
            ("v_codes", "int16", (head_dim // 4, 64 // halves)),
            *((f"k_{x}", "float16", k) for x in ("scale", "zero")),
            *((f"v_{x}", "float16", v) for x in ("scale", "zero")),
        ]
        sink, residual = int(options.get("sink", 0)), int(options["residual"])
        page = Layout.of(spec, "page", 64, planes)
        return Format(name, options, head_dim, page, raw, sink, residual)
    columns = [
        (bits, quarters * head_dim // 4)
        for bits, quarters in BANDS[int(options["bits"])]
    ]
    groups = (head_dim // 64, 64)
    planes = [(f"k_codes{b}", "int16", (16, c * b // 4)) for b, c in columns if b]
    planes += [
        ("v_codes", "int16", (head_dim // 4, 32)),
        ("k_scale", "float16", (1, head_dim)),
        ("k_zero", "float16", (1, sum(c for b, c in columns if b))),
        ("v_scale", "float16", groups),
        ("v_zero", "float16", groups),
    ]
    shared = [("order", "int16", (1, head_dim)), ("signs", "uint8", (1, head_dim // 8))]
    page, segment = (
        Layout.of(spec, "page", 64, planes),
        Layout.of(spec, "segment", 512, shared),
    )
    side = Layout.of(spec, "side", 0, [("squares", "float32", (1, head_dim))])
    sink = int(options.get("sink", 64))
    return Format(name, options, head_dim, page, raw, sink, 64, segment, side)


def plan_fingerprint(fmt: Format, layers: int, heads: int) -> str:
    prints = [x.fingerprint for x in fmt.layouts().values()]
    group = fingerprint((tuple(range(layers)), None, heads, fmt.head_dim, prints))
    return fingerprint(((0,) * layers, [group]))


# -- frames
def read_frame(frame: bytes) -> tuple[int, dict[str, Any], list[bytes]]:
    """Type, header and payload in its parts; every byte checked."""
    *known, kind, header_bytes, payload_bytes, checksum = struct.unpack_from(
        "<4sHHQQQ", frame
    )
    assert known == [b"dgKV", 4]
    packed, payload = frame[32 : 32 + header_bytes], frame[32 + header_bytes :]
    assert len(payload) == payload_bytes
    assert xxh3_64_intdigest(frame[:24] + packed) == checksum
    header = msgpack.unpackb(packed)
    digests = digests_of(header["digests"])
    parts = []
    for size in header.get("sizes", [payload_bytes]):
        parts.append(payload[:size])
        payload = payload[size:]
    assert [*map(xxh3_64_intdigest, parts)] == digests
    return kind, header, parts


def digests_of(data: bytes) -> list[int]:
    return [*struct.unpack(f"<{len(data) // 8}Q", data)]


def read_handoff(
    fmt: Format, frames: list[bytes], layers: int
) -> tuple[dict[tuple[str, int, int], bytes], dict[str, Any]]:
    """Items by (kind, layer, record), and the commit; complete, and of these layouts."""
    parts: dict[int, bytes] = {}
    commit: dict[str, Any] = {}
    for frame in frames:
        kind, header, payload = read_frame(frame)
        if kind == 2:
            commit = msgpack.unpackb(payload[0])
        else:
            parts |= zip(header["places"], payload, strict=True)
    wanted = [
        (kind, layer, record)
        for layer in range(layers)
        for kind, count in fmt.counts(commit["tokens"]).items()
        for record in range(count)
    ]
    found = [parts[place] for place in range(len(parts))]
    assert [*map(xxh3_64_intdigest, found)] == digests_of(commit["digests"])
    return dict(zip(wanted, found, strict=True)), commit


# -- what they mean
def unpack(words: Array, bits: int) -> Array:
    """Code words [r / 4][c / h] -> codes [r][c]."""
    halves = 4 // bits
    rows, columns = words.shape
    codes = np.zeros((4, rows, halves, columns), np.float64)
    for f in range(4):
        for g in range(halves):
            codes[f, :, g] = (words >> (f * bits + 8 * g)) & ((1 << bits) - 1)
    return codes.reshape(4 * rows, halves * columns)


def scaled(codes: Array, scale: Array, zero: Array) -> Array:
    """Each row of scales serves the rows of a group."""
    group = codes.shape[0] // scale.shape[0]
    scale, zero = (np.repeat(x.astype(np.float64), group, 0) for x in (scale, zero))
    return scale * (codes + zero)


def read_page(fmt: Format, block: bytes, segment: bytes) -> tuple[Array, Array]:
    """K and V [T][D] of one block."""
    plane = {name: fmt.page.read(block, name) for name in fmt.page.planes}
    if fmt.name == "raw":
        return plane["k"].astype(np.float64), plane["v"].astype(np.float64)
    if fmt.name == "kivi":
        bits = int(fmt.options["bits"])
        k = scaled(unpack(plane["k_codes"], bits), plane["k_scale"], plane["k_zero"])
        return k, scaled(
            unpack(plane["v_codes"], bits), plane["v_scale"], plane["v_zero"]
        ).T
    parts, first = [], 0
    for bits, quarters in BANDS[int(fmt.options["bits"])]:
        some = slice(first, first := first + quarters * fmt.head_dim // 4)
        scale = plane["k_scale"][:, some].astype(np.float64)
        if bits:
            codes = unpack(plane[f"k_codes{bits}"], bits)
            parts.append(scaled(codes, scale, plane["k_zero"][:, some]))
        else:
            parts.append(np.repeat(scale, 64, 0))
    k = np.zeros((64, fmt.head_dim))
    k[:, fmt.segment.read(segment, "order")[0]] = np.concatenate(parts, 1)
    bits_of = np.unpackbits(fmt.segment.read(segment, "signs")[0], bitorder="little")
    signs = 1.0 - 2.0 * bits_of
    turned = scaled(unpack(plane["v_codes"], 2), plane["v_scale"], plane["v_zero"])
    odd = [[(i & j).bit_count() % 2 for j in range(64)] for i in range(64)]
    hadamard = 1.0 - 2.0 * np.array(odd)
    v = (
        np.einsum("ij,bjt->bit", hadamard, turned.reshape(-1, 64, 64)).reshape(
            fmt.head_dim, 64
        )
        / 8
    )
    return k, (signs[:, None] * v).T


def read_layer(
    fmt: Format,
    items: Mapping[tuple[str, int, int], bytes],
    layer: int,
    heads: int,
    n: int,
) -> tuple[Array, Array]:
    """K and V [H][n][D] of one layer, in the order of tokens."""
    k, v = np.zeros((2, heads, n, fmt.head_dim))
    counts, sealed = fmt.counts(n), fmt.sealed(n)
    tokens = fmt.page.tokens

    def block(data: bytes, layout: Layout | None, head: int) -> bytes:
        return (
            data[head * layout.nbytes : (head + 1) * layout.nbytes] if layout else b""
        )

    for head in range(heads):
        for page in range(counts["page"]):
            at = slice(fmt.sink + page * tokens, fmt.sink + (page + 1) * tokens)
            owner = page * tokens // fmt.segment.tokens if fmt.segment else 0
            shared = block(items.get(("segment", layer, owner), b""), fmt.segment, head)
            data = block(items["page", layer, page], fmt.page, head)
            k[head, at], v[head, at] = read_page(fmt, data, shared)
        for record in range(counts["raw"]):
            first = record * RAW_TOKENS
            rows = min(RAW_TOKENS, n - sealed - first)
            data = items["raw", layer, record]
            size = len(data) // (2 * heads)
            dtype = fmt.raw.planes["k"][0]
            at = first if first < fmt.sink else first + sealed
            for x, place in ((k, 2 * head), (v, 2 * head + 1)):
                plane = read_plane(data, dtype, (rows, fmt.head_dim), place * size)
                x[head, at : at + rows] = plane
    return k, v


def attend(q: Array, k: Array, v: Array) -> Array:
    """[Hq][D]."""
    k, v = (np.repeat(x, q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = np.einsum("hd,htd->ht", q, k) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("ht,htd->hd", weights / weights.sum(1, keepdims=True), v)


def array(text: str, *shape: int) -> Array:
    """An array of a vector."""
    return (
        np.frombuffer(base64.b64decode(text), "<f4").reshape(shape).astype(np.float64)
    )
