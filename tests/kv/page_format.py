"""Reads hand-offs as docs/page-format.md tells it, and knows nothing else: no line of the package.

numpy for arrays, msgpack and xxhash because the page names them.
"""

import base64
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np
from xxhash import xxh3_64_intdigest

RAW_TOKENS = 16
SIZES = {"uint8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}
BANDS = {3: ((4, 2), (2, 2)), 2: ((4, 1), (2, 2), (0, 1))}  # bits, quarters of D

Array = np.ndarray
Shape = tuple[int, ...]


def fingerprint(value: object) -> str:
    return blake2b(repr(value).encode(), digest_size=8).hexdigest()


def align(size: int, unit: int = 16) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True)
class Layout:
    """Planes: name -> (dtype, shape, offset)."""

    spec: str
    kind: str
    tokens: int
    planes: Mapping[str, tuple[str, Shape, int]]
    nbytes: int
    latent: int | None = None

    @classmethod
    def of(
        cls,
        spec: str,
        kind: str,
        tokens: int,
        planes: list[tuple[str, str, Any]],
        unit: int = 16,
    ) -> "Layout":
        laid_out = {}
        end = 0
        for name, dtype, shape in planes:
            offset = align(end, unit)
            laid_out[name] = (dtype, shape, offset)
            end = offset + SIZES[dtype] * int(np.prod(shape))
        return cls(spec, kind, tokens, laid_out, align(end, unit))

    @property
    def fingerprint(self) -> str:
        planes = tuple(
            f"Plane(name={name!r}, dtype={dtype!r}, shape={shape}, offset={offset})"
            for name, (dtype, shape, offset) in self.planes.items()
        )
        identity = (1, self.spec, self.kind, self.tokens, self.nbytes, planes)
        if self.latent is not None:
            identity += (self.latent,)
        return fingerprint(identity)

    def without_values(self, latent: int) -> "Layout":
        planes = [
            (name, dtype, shape)
            for name, (dtype, shape, _) in self.planes.items()
            if name != "v" and not name.startswith("v_")
        ]
        layout = Layout.of(self.spec, self.kind, self.tokens, planes)
        return replace(layout, latent=latent)

    def read(self, block: bytes, name: str) -> Array:
        dtype, shape, offset = self.planes[name]
        return read_plane(block, dtype, shape, offset)


def read_plane(data: bytes, dtype: str, shape: Shape, offset: int = 0) -> Array:
    count = int(np.prod(shape))
    if dtype == "bfloat16":
        words = np.frombuffer(data, "<u2", count, offset).astype(np.uint32) << 16
        return words.view(np.float32).reshape(shape)
    name = {"int16": "<u2", "uint8": "u1", "float16": "<f2", "float32": "<f4"}[dtype]
    return np.frombuffer(data, name, count, offset).reshape(shape)


def raw_layout(dtype: str, head_dim: int) -> Layout:
    shape = (RAW_TOKENS, head_dim)
    planes = [
        ("k", dtype, shape),
        ("v", dtype, shape),
    ]
    return Layout.of(f"raw:dtype={dtype}", "raw", RAW_TOKENS, planes)


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
        return {
            "segment": -(-sealed // self.segment.tokens) if self.segment else 0,
            "page": sealed // self.page.tokens,
            "side": 1 if self.side is not None and not sealed else 0,
            "raw": -(-(n - sealed) // RAW_TOKENS),
        }

    def layouts(self) -> dict[str, Layout]:
        layouts = {
            "page": self.page,
            "raw": self.raw,
            "segment": self.segment,
            "side": self.side,
        }
        return {kind: layout for kind, layout in layouts.items() if layout}


def format_of(
    spec: str, head_dim: int, dtype: str, latent: int | None = None
) -> Format:
    fmt = ordinary_format(spec, head_dim, dtype)
    if latent is None:
        return fmt
    page, raw = (x.without_values(latent) for x in (fmt.page, fmt.raw))
    return replace(fmt, page=page, raw=raw)


def ordinary_format(spec: str, head_dim: int, dtype: str) -> Format:
    name, _, rest = spec.partition(":")
    options = dict(item.split("=") for item in rest.split(","))
    if name == "raw":
        dtypes = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
        raw = raw_layout(dtypes[options["dtype"]], head_dim)
        return Format(name, options, head_dim, page=raw, raw=raw)
    tail_dtype = dtype if dtype in ("float16", "bfloat16") else "float16"
    raw = raw_layout(tail_dtype, head_dim)
    if name == "kivi":
        return Format(
            name,
            options,
            head_dim,
            page=kivi_page(spec, options, head_dim),
            raw=raw,
            sink=int(options.get("sink", 0)),
            residual=int(options["residual"]),
        )
    return Format(
        name,
        options,
        head_dim,
        page=banded_page(spec, options, head_dim),
        raw=raw,
        sink=int(options.get("sink", 64)),
        residual=64,
        segment=banded_segment(spec, head_dim),
        side=Layout.of(spec, "side", 0, [("squares", "float32", (1, head_dim))]),
    )


def kivi_page(spec: str, options: Mapping[str, str], head_dim: int) -> Layout:
    bits = int(options["bits"])
    group = int(options["group"])
    halves = 4 // bits
    k = (64 // group, head_dim)
    v = (head_dim // group, 64)
    planes = [
        ("k_codes", "int16", (16, head_dim // halves)),
        ("v_codes", "int16", (head_dim // 4, 64 // halves)),
        ("k_scale", "float16", k),
        ("k_zero", "float16", k),
        ("v_scale", "float16", v),
        ("v_zero", "float16", v),
    ]
    return Layout.of(spec, "page", 64, planes)


def banded_page(spec: str, options: Mapping[str, str], head_dim: int) -> Layout:
    planes: list[tuple[str, str, Any]] = []
    coded = 0  # channels that have codes
    for bits, quarters in BANDS[int(options["bits"])]:
        channels = quarters * head_dim // 4
        if bits:
            shape = (16, channels * bits // 4)
            planes.append((f"k_codes{bits}", "int16", shape))
            coded += channels
    groups = (head_dim // 64, 64)
    planes += [
        ("v_codes", "int16", (head_dim // 4, 32)),
        ("k_scale", "float16", (1, head_dim)),
        ("k_zero", "float16", (1, coded)),
        ("v_scale", "float16", groups),
        ("v_zero", "float16", groups),
    ]
    return Layout.of(spec, "page", 64, planes)


def banded_segment(spec: str, head_dim: int) -> Layout:
    planes = [
        ("order", "int16", (1, head_dim)),
        ("signs", "uint8", (1, head_dim // 8)),
    ]
    return Layout.of(spec, "segment", 512, planes)


def state_layouts(vector: Mapping[str, Any]) -> list[Layout]:
    """Of layers that keep a state."""
    layouts = []
    for state in vector.get("states", ()):
        planes = [(name, dtype, tuple(shape)) for name, dtype, shape in state]
        layouts.append(Layout.of("state", "side", 0, planes, 128))
    return layouts


def plan_fingerprint(fmt: Format, layers: int, heads: int, states: list[Layout]) -> str:
    prints = [x.fingerprint for x in fmt.layouts().values()]
    groups = [(tuple(range(layers)), None, heads, fmt.head_dim, prints)]
    for layer, layout in enumerate(states, layers):
        groups.append(((layer,), None, 1, 0, [layout.fingerprint]))
    group_of = (0,) * layers + tuple(range(1, len(groups)))
    return fingerprint((group_of, [*map(fingerprint, groups)]))


# -- frames
def read_frame(frame: bytes) -> tuple[int, dict[str, Any], list[bytes]]:
    """Type, header and payload in its parts; every byte checked."""
    fields = struct.unpack_from("<4sHHQQQ", frame)
    magic, version, kind, header_bytes, payload_bytes, checksum = fields
    assert magic == b"dgKV"
    assert version == 4
    packed = frame[32 : 32 + header_bytes]
    payload = frame[32 + header_bytes :]
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
    fmt: Format, frames: list[bytes], layers: int, states: int
) -> tuple[dict[tuple[str, int, int], bytes], dict[str, Any]]:
    """Items by (kind, layer, record), and the commit; complete, and of these layouts."""
    parts: dict[int, bytes] = {}
    commit: dict[str, Any] = {}
    for frame in frames:
        kind, header, payload = read_frame(frame)
        if kind == 2:
            commit = msgpack.unpackb(payload[0])
        else:
            parts.update(zip(header["places"], payload, strict=True))
    keys = [
        (kind, layer, record)
        for layer in range(layers)
        for kind, count in fmt.counts(commit["tokens"]).items()
        for record in range(count)
    ]
    keys += [("side", layer, 0) for layer in range(layers, layers + states)]
    items = [parts[place] for place in range(len(parts))]
    assert [*map(xxh3_64_intdigest, items)] == digests_of(commit["digests"])
    return dict(zip(keys, items, strict=True)), commit


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
    planes = {name: fmt.page.read(block, name) for name in fmt.page.planes}
    if fmt.name == "raw":
        return planes["k"].astype(np.float64), planes["v"].astype(np.float64)
    if fmt.name == "kivi":
        bits = int(fmt.options["bits"])
        k = scaled(unpack(planes["k_codes"], bits), planes["k_scale"], planes["k_zero"])
        if fmt.page.latent is not None:
            return k, k[:, : fmt.page.latent]
        v = scaled(unpack(planes["v_codes"], bits), planes["v_scale"], planes["v_zero"])
        return k, v.T
    return banded_k(fmt, planes, segment), banded_v(fmt, planes, segment)


def banded_k(fmt: Format, planes: Mapping[str, Array], segment: bytes) -> Array:
    """K [T][D]: bands side by side, then the channels in their places."""
    bands = []
    first = 0
    for bits, quarters in BANDS[int(fmt.options["bits"])]:
        end = first + quarters * fmt.head_dim // 4
        scale = planes["k_scale"][:, first:end].astype(np.float64)
        if bits:
            codes = unpack(planes[f"k_codes{bits}"], bits)
            zero = planes["k_zero"][:, first:end]
            bands.append(scaled(codes, scale, zero))
        else:
            bands.append(np.repeat(scale, 64, 0))
        first = end
    k = np.zeros((64, fmt.head_dim))
    order = fmt.segment.read(segment, "order")[0]
    k[:, order] = np.concatenate(bands, 1)
    return k


def banded_v(fmt: Format, planes: Mapping[str, Array], segment: bytes) -> Array:
    """V [T][D]: a Hadamard matrix turns groups of 64 channels back, then signs."""
    codes = unpack(planes["v_codes"], 2)
    rotated = scaled(codes, planes["v_scale"], planes["v_zero"])
    odd = [[(i & j).bit_count() % 2 for j in range(64)] for i in range(64)]
    hadamard = 1.0 - 2.0 * np.array(odd)
    groups = rotated.reshape(-1, 64, 64)
    v = np.einsum("ij,bjt->bit", hadamard, groups) / 8
    words = fmt.segment.read(segment, "signs")[0]
    signs = 1.0 - 2.0 * np.unpackbits(words, bitorder="little")
    return (signs[:, None] * v.reshape(fmt.head_dim, 64)).T


def block_of(data: bytes, layout: Layout, head: int) -> bytes:
    return data[head * layout.nbytes : (head + 1) * layout.nbytes]


def read_layer(
    fmt: Format,
    items: Mapping[tuple[str, int, int], bytes],
    layer: int,
    heads: int,
    n: int,
) -> tuple[Array, Array]:
    """K and V [H][n][D] of one layer, in the order of tokens."""
    latent = fmt.raw.latent
    k = np.zeros((heads, n, fmt.head_dim))
    v = np.zeros((heads, n, latent or fmt.head_dim))
    counts = fmt.counts(n)
    tokens = fmt.page.tokens
    for head in range(heads):
        for page in range(counts["page"]):
            first = fmt.sink + page * tokens
            segment = b""
            if fmt.segment:
                owner = page * tokens // fmt.segment.tokens
                record = items["segment", layer, owner]
                segment = block_of(record, fmt.segment, head)
            block = block_of(items["page", layer, page], fmt.page, head)
            page_k, page_v = read_page(fmt, block, segment)
            k[head, first : first + tokens] = page_k
            v[head, first : first + tokens] = page_v
        for record in range(counts["raw"]):
            data = items["raw", layer, record]
            planes = len(fmt.raw.planes)  # K and V of each head, or K
            plane_bytes = len(data) // (planes * heads)
            first_plane = data[planes * head * plane_bytes :]
            read_raw_page(fmt, first_plane, plane_bytes, record, k[head], v[head])
    return k, v


def read_raw_page(
    fmt: Format, data: bytes, plane_bytes: int, record: int, k: Array, v: Array
) -> None:
    """Put the tokens of one raw page into K and V [n][D] of a head.

    data: from the planes of this head on; planes end with the last token
    """
    n = len(k)
    sealed = fmt.sealed(n)
    first = record * RAW_TOKENS
    rows = min(RAW_TOKENS, n - sealed - first)
    position = first if first < fmt.sink else first + sealed
    dtype = fmt.raw.planes["k"][0]
    shape = (rows, fmt.head_dim)
    tokens = slice(position, position + rows)
    k[tokens] = read_plane(data, dtype, shape, 0)
    if fmt.raw.latent is None:
        v[tokens] = read_plane(data, dtype, shape, plane_bytes)
    else:
        v[tokens] = k[tokens, : fmt.raw.latent]


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
