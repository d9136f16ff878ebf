"""The offset of every byte of a record. Pure arithmetic: no tensors, no arena, no codec by name.

    arena        uint8, one per worker; a page id is an address in it: byte offset / 128
    page         T tokens of one sequence     │ layer page │ layer page │ ...  of a layer group
    layer page   is sent and hashed whole     │ block │ block │ ...            one per KV head
    block        planes, 16-byte aligned      │ K codes │ V codes │ K scale │ ...

A segment, a side record and a raw page have the same structure, with layouts of their own. Codecs
turn layouts into the formats that kernels read and write; the wire and the pool move the same bytes
without looking inside.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import repeat
from typing import NamedTuple

from disagg.errors import LayoutError

FORMAT_VERSION = 1
ARENA_UNIT = 128  # bytes; page ids count these, so int32 ids reach 256 GiB
PLANE_ALIGN = 16  # bytes; one vector load of a GPU thread
RAW_TOKENS = 16  # tokens of a raw page
STATE = "state"  # stands for a codec spec where a layer keeps a state: no codec
EXACT, BF16, INT8 = "exact", "bf16", "int8"  # the forms in which states are handed off
# tokens that share a segment in most codecs, counted from the first page
SEGMENT_TOKENS = 2048

ITEM_BYTES = {
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
}


def align(size: int, to: int) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


def units_for(nbytes: int) -> int:
    """How many units of an arena hold so many bytes."""
    return -(-nbytes // ARENA_UNIT)


def record_span(page: int, nbytes: int) -> slice:
    """The bytes of a record in an arena, by its page id."""
    start = page * ARENA_UNIT
    return slice(start, start + nbytes)


class Kind(StrEnum):
    """The kinds of records."""

    PAGE = "page"
    SEGMENT = "segment"
    SIDE = "side"
    RAW = "raw"
    WIRE = "wire"  # a state in the form in which it is handed off

    __hash__ = (
        str.__hash__
    )  # like equality; Enum's own is slow, and every item is looked up


class Item(NamedTuple):
    """One layer page of a hand-off: it is sent, hashed and acknowledged whole.

    group, layer: index of the layer group in the plan, of the layer in the model
    record:       index among the records of this kind that the sequence has in the group
    """

    kind: Kind
    group: int
    layer: int
    record: int

    def __str__(self) -> str:
        return f"{self.kind} {self.record} of layer {self.layer}"


def items_of(kind: Kind, group: int, layer: int, records: Iterable[int]) -> list[Item]:
    """The items of these records of a layer.

    A long prompt has 70,000 items, so they are made without a Python call for each.
    """
    fields = zip(repeat(kind), repeat(group), repeat(layer), records, strict=False)
    return [*map(partial(tuple.__new__, Item), fields)]


class FinalAt(StrEnum):
    """When the bytes of a codec's pages are final, so that they can be sent, shared and resumed."""

    PAGE = "page"
    SEGMENT = "segment"
    PROMPT = "prompt"


@dataclass(frozen=True)
class Plane:
    """One named tensor inside a block: `shape` in items of `dtype`, at `offset` bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def span(self, page: int) -> slice:
        """Its bytes in an arena, in the first block of the record at a page."""
        start = page * ARENA_UNIT + self.offset
        return slice(start, start + self.nbytes)

    def units(self) -> range:
        """The units of the arena that it lies in, counted from its record."""
        return range(self.offset // ARENA_UNIT, units_for(self.offset + self.nbytes))


@dataclass(frozen=True)
class Layout:
    """The planes of one block: the part of a record that one layer and one KV head own.

    spec:        canonical codec spec that wrote the bytes, "kivi:bits=2,group=64,residual=64"
    tokens:      tokens that one record covers; 0 for a side record
    block_bytes: size of a block, a multiple of 16
    fingerprint: 16 hex digits; two layouts with equal fingerprints mean the same bytes
    latent:      where V is not stored, since it is the first so many channels of K; None: it is
    """

    spec: str
    kind: Kind
    tokens: int
    planes: tuple[Plane, ...]
    block_bytes: int
    fingerprint: str
    latent: int | None = None

    def plane(self, name: str) -> Plane:
        """The plane called `name`; LayoutError lists the known ones."""
        for plane in self.planes:
            if plane.name == name:
                return plane
        names = ", ".join(plane.name for plane in self.planes)
        raise LayoutError(
            f"layout {self.spec} ({self.kind}) has no plane {name!r}; it has {names}"
        )


def make_layout(
    spec: str,
    kind: Kind,
    tokens: int,
    planes: Iterable[tuple[str, str, tuple[int, ...]]],
    plane_align: int = PLANE_ALIGN,
    latent: int | None = None,
) -> Layout:
    """Lay planes (name, dtype, shape) one after another, each on a boundary of `plane_align`."""
    laid_out: list[Plane] = []
    end = 0
    for name, dtype, shape in planes:
        plane = Plane(name, dtype, shape, align(end, plane_align))
        laid_out.append(plane)
        end = plane.offset + plane.nbytes
    block_bytes = align(end, plane_align)
    identity: tuple[object, ...] = (
        FORMAT_VERSION,
        spec,
        kind.value,
        tokens,
        block_bytes,
        tuple(map(str, laid_out)),
    )
    if latent is not None:
        identity += (latent,)
    return Layout(
        spec=spec,
        kind=kind,
        tokens=tokens,
        planes=tuple(laid_out),
        block_bytes=block_bytes,
        fingerprint=fingerprint_of(identity),
        latent=latent,
    )


def make_raw_layout(dtype: str, head_dim: int) -> Layout:
    """A raw page: 16 tokens of exact K and V, token-major."""
    shape = (RAW_TOKENS, head_dim)
    planes = [("k", dtype, shape), ("v", dtype, shape)]
    return make_layout(f"raw:dtype={dtype}", Kind.RAW, RAW_TOKENS, planes)


def make_latent_layout(layout: Layout, latent: int) -> Layout:
    """A layout without its planes of V, which is the first `latent` channels of K instead."""
    planes = [
        (plane.name, plane.dtype, plane.shape)
        for plane in layout.planes
        if plane.name != "v" and not plane.name.startswith("v_")
    ]
    return make_layout(layout.spec, layout.kind, layout.tokens, planes, latent=latent)


def make_state_layout(planes: Iterable[tuple[str, str, tuple[int, ...]]]) -> Layout:
    """The side record of a layer that keeps a state: its planes (name, dtype, shape).

    Planes start on boundaries of the arena's unit, since a step gathers them unit by unit.
    """
    return make_layout(STATE, Kind.SIDE, 0, planes, plane_align=ARENA_UNIT)


def make_wire_layout(state: Layout, form: str) -> Layout | None:
    """The record in which a state is handed off: its matrices in fewer bits, all else as it is.

    form:    EXACT; BF16; or INT8: codes, and a scale for each row and each column
    returns: None where the state is handed off as it is: it has no matrices, or the form is EXACT
    """
    planes: list[tuple[str, str, tuple[int, ...]]] = []
    for plane in state.planes:
        if form == EXACT or not is_state_matrix(plane):
            planes.append((plane.name, plane.dtype, plane.shape))
        elif form == BF16:
            planes.append((plane.name, "bfloat16", plane.shape))
        else:
            *heads, rows, columns = plane.shape
            planes.append((plane.name, "int8", plane.shape))
            planes.append((row_scales(plane.name), "bfloat16", (*heads, rows, 1)))
            planes.append((column_scales(plane.name), "bfloat16", (*heads, 1, columns)))
    wire = make_layout(f"{STATE}:{form}", Kind.WIRE, 0, planes, plane_align=ARENA_UNIT)
    return wire if wire.block_bytes < state.block_bytes else None


def is_state_matrix(plane: Plane) -> bool:
    """Whether a plane is what a recurrence sums up; a convolution keeps its last inputs."""
    return plane.name.startswith("recurrent") and len(plane.shape) > 1


def row_scales(name: str) -> str:
    """The plane with the scales of the rows of a matrix."""
    return f"{name}_rows"


def column_scales(name: str) -> str:
    """The plane with the scales of the columns of a matrix."""
    return f"{name}_columns"


def fingerprint_of(identity: object) -> str:
    """16 hex digits that stand for a tuple of plain values."""
    return hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
