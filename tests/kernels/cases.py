"""Paged inputs for the kernel tests, and exact attention to hold the answers against."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from disagg.kernels.formats import (
    ARENA_UNIT,
    AlignedFormat,
    BlockRotation,
    ExactFormat,
    Format,
    HadamardRotation,
    LowRank,
    PageFormat,
    Scale,
    Side,
    Sparse,
)
from disagg.kernels.reference import aligned, codes
from disagg.kernels.reference.encode import encode
from disagg.kernels.reference.pages import pack_bits, store_blocks
from disagg.kernels.sealing import Segmentation, Target
from disagg.kernels.view import View

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BASE = 3 * 48  # an odd place for a layer page, 16-byte aligned
SEGMENT_BASE = 16
T = 64


@dataclass(frozen=True)
class Case:
    """A ragged batch over shuffled pages; k, v [B, H, n, D] are what the pages hold.

    present: [B, H, n] bool - tokens that a mask does not leave out; None: all
    """

    q: Tensor
    view: View
    k: Tensor
    v: Tensor
    present: Tensor | None = None

    def seeing(self, **tables: Tensor) -> "Case":
        return replace(self, view=replace(self.view, **tables))

    def on(self, device: str) -> tuple[Tensor, View]:
        moved = {
            name: x.to(device)
            for name, x in vars(self.view).items()
            if isinstance(x, Tensor)
        }
        return self.q.to(device), replace(self.view, **moved)


class Planes:
    """Offsets handed out one after another, each on 16 bytes."""

    def __init__(self):
        self.end = 0

    def take(self, nbytes: int) -> int:
        at, self.end = self.end, self.end + -(-nbytes // 16) * 16
        return at


def make_format(
    head_dim: int = 64,
    bits: int = 2,
    k_by: str = "column",
    v_by: str = "column",
    group: int = 64,
    v_group: int = 0,
    tokens: int = T,
    zero: bool = True,
    k_shared: bool = False,
    rank: int = 0,
    own: bool = False,
    slots: int = 0,
    block: int = 0,
    floating: bool = False,
    valid: bool = False,
    latent: int | None = None,
) -> PageFormat:
    """Any format; by default KIVI's.

    v_group:  0: as group
    k_shared: scales of K are in the segment
    own:      low-rank bases are in the page
    block:    channels of a rotation; 0: none
    """
    page = Planes()
    segment = Planes()
    sides = []
    shapes = (
        ("k", k_by, tokens, head_dim, group),
        ("v", v_by, head_dim, tokens, v_group or group),
    )
    if latent is not None:
        shapes = shapes[:1]
    for name, by, rows, columns, group_size in shapes:
        scale = _make_scale(
            by,
            rows,
            columns,
            group_size,
            planes=segment if name == "k" and k_shared else page,
            has_zero=zero,
            center=0 if floating else -(1 << (bits - 1)),
            shared=name == "k" and k_shared,
        )
        codes_at = page.take(rows * columns * bits // 8)
        a = page.take(2 * tokens * rank)
        b = (page if own else segment).take(2 * head_dim * rank)
        side = Side(
            rows,
            columns,
            bits,
            codes_at,
            scale,
            low_rank=LowRank(rank, a, b, not own) if rank else None,
            sparse=_make_sparse(columns, slots, page),
            rotation=_make_rotation(block, segment),
            floating=floating,
        )
        sides.append(side)
    mask = page.take(tokens // 8) if valid else None
    return PageFormat(
        tokens,
        head_dim,
        page.end,
        segment.end,
        k=sides[0],
        v=sides[1] if latent is None else None,
        valid=mask,
        latent=latent,
    )


def _make_scale(
    by: str,
    rows: int,
    columns: int,
    group: int,
    planes: Planes,
    has_zero: bool,
    center: int,
    shared: bool,
) -> Scale:
    """Scales of groups, of all rows where they are shared."""
    grouped = {"column": rows, "row": columns, "block": 1}[by]
    size = grouped if shared else min(group, grouped)
    count = {
        "column": grouped // size * columns,
        "row": grouped // size * rows,
        "block": 2,
    }[by]
    scale_at = planes.take(2 * count)
    zero_at = planes.take(2 * count) if has_zero else None
    return Scale(by, size, scale_at, zero_at, center=center, shared=shared)


def _make_sparse(columns: int, slots: int, planes: Planes) -> Sparse | None:
    if not slots:
        return None
    index = planes.take(columns * slots)
    delta = planes.take(2 * columns * slots)
    return Sparse(slots, index, delta, slots % 2 == 0)


def _make_rotation(block: int, planes: Planes) -> BlockRotation | None:
    if not block:
        return None
    return BlockRotation(block, planes.take(2 * block * block))


def quant_format(bits: int, head_dim: int, k_group: int, v_group: int, tokens: int = T):
    return make_format(head_dim, bits, group=k_group, v_group=v_group, tokens=tokens)


def banded_format(bits: int, head_dim: int) -> PageFormat:
    """K in bands of 4, 2 and 0 bits (bits=2) or of 4 and 2 (bits=3), V rotated, at 2 bits."""
    shares = ((4, 4), (2, 2), (0, 4)) if bits == 2 else ((4, 2), (2, 2))
    bands = [(width, head_dim // share) for width, share in shares]
    with_zeros = sum(columns for width, columns in bands if width)
    page = Planes()
    scale_at = page.take(2 * head_dim)
    zero_at = page.take(2 * with_zeros)
    sides = []
    first = 0
    for width, columns in bands:
        codes_at = page.take(T * columns * width // 8)
        scale = Scale(
            "column",
            T,
            scale_at + 2 * first,
            zero_at + 2 * first if width else None,
            fitted=bool(width),
        )
        sides.append(Side(T, columns, width, codes_at, scale))
        first += columns
    v_scale_at = page.take(2 * T * head_dim // 64)
    v_zero_at = page.take(2 * T * head_dim // 64)
    v_codes_at = page.take(T * head_dim // 4)
    v_scale = Scale("column", 64, v_scale_at, v_zero_at, fitted=True)
    signs_first = head_dim % 128 == 0
    return PageFormat(
        tokens=T,
        head_dim=head_dim,
        block_bytes=page.end,
        segment_bytes=2 * head_dim + max(16, head_dim // 8),
        k=sides[0],
        v=Side(head_dim, T, 2, v_codes_at, v_scale),
        bands=tuple(sides[1:]),
        hadamard=HadamardRotation(
            order=head_dim // 8 if signs_first else 0,
            signs=0 if signs_first else 2 * head_dim,
        ),
    )


SIZES = {
    "b2-D16-g16": quant_format(2, 16, 64, 16),
    "b2-D64-g32": quant_format(2, 64, 32, 32),
    "b2-D80-g16": quant_format(2, 80, 64, 16),
    "b2-D128-g32": quant_format(2, 128, 32, 32),
    "b2-D128-g64": quant_format(2, 128, 64, 64),
    "b2-D128-T128": quant_format(2, 128, 128, 128, tokens=128),
    "b4-D80-g80": quant_format(4, 80, 32, 80),
    "b4-D96-g32": quant_format(4, 96, 32, 32),
    "b4-D128-g64": quant_format(4, 128, 64, 64),
    "b4-D256-g64": quant_format(4, 256, 64, 64),
    "b4-D512-g64": quant_format(4, 512, 64, 64),
}
BANDED = [(2, 64), (3, 64), (2, 128), (3, 128), (2, 256), (3, 256)]  # bits, head dim


def random_segment(fmt: PageFormat, heads: int, seed: int) -> Tensor:
    """[H, segment_bytes] u8 with an order of its own, and the signs that all segments have."""
    segment = torch.zeros(heads, fmt.segment_bytes, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.Generator().manual_seed(99)
    orders = [torch.randperm(fmt.head_dim, generator=generator) for _ in range(heads)]
    bits = torch.randint(
        0, 256, (heads, fmt.head_dim // 8), generator=signs, dtype=torch.uint8
    )
    order = torch.stack(orders).short().view(torch.uint8)
    for at, x in ((fmt.hadamard.order, order), (fmt.hadamard.signs, bits)):
        segment[:, at : at + x.shape[1]] = x
    return segment


FORMATS = {
    "kivi": {"group": 32},
    "pertoken": {"bits": 4, "k_by": "row", "group": 32},
    "pertoken-2bit": {"head_dim": 128, "k_by": "row"},
    "kcvt": {"bits": 4, "k_shared": True, "head_dim": 80, "group": 80},
    "int8": {"bits": 8, "k_by": "row", "zero": False},
    "fp8": {
        "bits": 8,
        "k_by": "block",
        "v_by": "block",
        "zero": False,
        "floating": True,
    },
    "gear-l": {"rank": 4, "head_dim": 128},
    "gear-l-shared": {"rank": 3, "bits": 4, "k_shared": True},
    "gear": {"rank": 2, "slots": 2, "group": 32},
    "gear-4bit": {"rank": 2, "slots": 1, "bits": 4},
    "gear-odd": {"rank": 3, "slots": 3, "bits": 4},
    "gear-l-own": {"rank": 2, "bits": 4, "own": True, "head_dim": 128},
    "gear-own": {"rank": 2, "slots": 2, "group": 32, "own": True},
    "gear-odd-own": {"rank": 3, "slots": 3, "bits": 4, "own": True},
    "decoquant": {"bits": 4, "k_by": "row", "block": 16},
    "decoquant-2bit": {"k_by": "row", "block": 8},
    "ott": {"group": 32, "valid": True, "tokens": 128},
}


# by name: as FORMATS, of pages of latents
LATENTS = {
    "kivi-2bit": {"head_dim": 288, "group": 32, "latent": 256},
    "kivi-4bit": {"head_dim": 144, "bits": 4, "group": 16, "latent": 128},
    "kivi-T128": {"head_dim": 176, "group": 128, "tokens": 128, "latent": 144},
    "pertoken-2bit": {"head_dim": 320, "k_by": "row", "latent": 256},
    "pertoken-4bit": {
        "head_dim": 96,
        "bits": 4,
        "k_by": "row",
        "group": 32,
        "latent": 80,
    },
    "pertoken-8bit": {
        "head_dim": 80,
        "bits": 8,
        "k_by": "row",
        "group": 16,
        "latent": 48,
    },
    "kcvt": {"head_dim": 160, "bits": 4, "k_shared": True, "latent": 144},
    "kcvt-8bit": {"head_dim": 112, "bits": 8, "k_shared": True, "latent": 64},
    "kcvt-2bit": {"head_dim": 96, "bits": 2, "k_shared": True, "latent": 64},
    "int8": {
        "head_dim": 576,
        "bits": 8,
        "k_by": "row",
        "group": 576,
        "zero": False,
        "latent": 512,
    },
    "fp8": FORMATS["fp8"] | {"head_dim": 144, "latent": 128},
}


def latent_format(name: str) -> PageFormat:
    """A format of LATENTS."""
    return make_format(**LATENTS[name])


def named_format(name: str, **changes) -> PageFormat:
    """A format of FORMATS, with other options where they are passed."""
    return make_format(**(FORMATS[name] | changes))


def int32(*rows) -> Tensor:
    """Ids and positions as tables hold them."""
    return torch.tensor(rows, dtype=torch.int32)


def raw_format(dtype: str, head_dim: int, latent: int | None = None) -> ExactFormat:
    size = 16 * head_dim * getattr(torch, dtype).itemsize
    if latent is not None:
        return ExactFormat(dtype, head_dim, size, 0, None, latent=latent)
    return ExactFormat(dtype, head_dim, 2 * size, 0, size)


def aligned_format(head_dim: int) -> AlignedFormat:
    whole = T * head_dim
    half = T * head_dim // 2
    sizes = (whole, half, half, whole, half, half, head_dim, head_dim)
    offsets = [sum(sizes[:i]) for i in range(8)]
    return AlignedFormat(T, head_dim, sum(sizes), *offsets)


def make_case(
    fmt: Format,
    lengths: list[int],
    heads: int,
    width: int,
    m: int = 1,
    run: int = 2,
    loud=1.0,
) -> Case:
    """Sequences of `lengths` tokens whose last page is full of tokens that no query sees.

    run:  pages of a segment, where the format has segments
    loud: what channel 5 of V is multiplied by in one token of 8
    """
    k, v = random_kv(lengths, heads, fmt.head_dim, fmt.tokens)
    v[..., 3::8, 5] *= loud
    hi = torch.tensor(
        [[max(0, n - m + 1 + j) for j in range(m)] for n in lengths]
    ).int()
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(len(lengths), m, heads * width, fmt.head_dim, generator=generator)
    view = partial(
        View, lo=torch.zeros_like(hi), hi=hi, fmt=fmt, base=BASE, heads=heads
    )
    if isinstance(fmt, PageFormat):
        return _code_case(fmt, q, view, k, v, lengths, run)
    if isinstance(fmt, AlignedFormat):
        k = k.half()
        v = v.half()
        blocks = torch.stack(
            [aligned.encode(a, b, fmt) for a, b in zip(k, v, strict=True)]
        )
    else:
        dtype = getattr(torch, fmt.dtype)
        k = k.to(dtype)
        v = v.to(dtype)
        stored = (k, v) if fmt.v is not None else (k,)
        sides = [
            x.unflatten(2, (-1, fmt.tokens)).transpose(1, 2).flatten(3) for x in stored
        ]
        v = v if fmt.v is not None else k[..., : fmt.latent]
        blocks = torch.cat([x.contiguous().view(torch.uint8) for x in sides], -1)
    arena, pages = place(blocks)
    _repeat_first(pages, lengths, fmt.tokens)
    return Case(q, view(arena=arena, pages=pages), k.float(), v.float())


def _code_case(fmt: PageFormat, q, view, k, v, lengths, run) -> Case:
    count = k.shape[2] // fmt.tokens
    pairs = [_encode(a, b, fmt, run) for a, b in zip(k, v, strict=True)]
    blocks = torch.stack([x for x, _ in pairs])
    present = None
    if fmt.valid is not None:
        generator = torch.Generator().manual_seed(3)
        shape = (*blocks.shape[:3], fmt.tokens)
        mask = torch.randint(0, 2, shape, generator=generator).bool()
        blocks[..., fmt.valid : fmt.valid + fmt.tokens // 8] = pack_bits(mask)
        present = mask.transpose(1, 2).flatten(2)
    arena, pages = place(blocks)
    owned = None
    shared = {}
    if fmt.segment_bytes:
        stack = torch.stack([x for _, x in pairs])  # [B, S, H, bytes]
        arena, ids = append_records(arena, stack.flatten(0, 1), SEGMENT_BASE)
        owner = (torch.arange(count) // run).int().repeat(len(lengths), 1)
        owned = stack.repeat_interleave(run, 1)[:, :count]
        shared = {"segments": ids.view(len(lengths), -1), "owner": owner}
        _repeat_first(owner, lengths, fmt.tokens)
    exact = [x.transpose(1, 2).flatten(2, 3) for x in codes.decode(blocks, owned, fmt)]
    _repeat_first(pages, lengths, fmt.tokens)
    paged = view(arena=arena, pages=pages, segment_base=SEGMENT_BASE, **shared)
    return Case(q, paged, *exact, present)


def _encode(
    k: Tensor, v: Tensor, fmt: PageFormat, run: int
) -> tuple[Tensor, Tensor | None]:
    """As `encode`; where a segment has to be given, each has an order of its own."""
    tokens = run * fmt.tokens
    heads = k.shape[0]
    if not fmt.hadamard:
        stored_v = v if fmt.v is not None else None
        return encode(k, stored_v, fmt, Segmentation(tokens))
    blocks = []
    segments = []
    parts = zip(k.split(tokens, 1), v.split(tokens, 1), strict=True)
    for i, (part_k, part_v) in enumerate(parts):
        cut = Segmentation(tokens, 0, random_segment(fmt, heads, i))
        part_blocks, segment = encode(part_k, part_v, fmt, cut)
        assert segment is not None
        blocks.append(part_blocks)
        segments.append(segment)
    return torch.cat(blocks), torch.cat(segments)


def _repeat_first(table: Tensor, lengths: list[int], tokens: int) -> None:
    """Short rows are padded with what comes first."""
    for row, n in enumerate(lengths):
        table[row, max(1, -(-n // tokens)) :] = table[row, 0]


def append_records(arena: Tensor, records: Tensor, base: int) -> tuple[Tensor, Tensor]:
    """The arena with records [N, H, bytes] behind what is there, last one first; their ids [N]."""
    stride = -(-(base + records[0].numel()) // ARENA_UNIT)
    ids = torch.arange(records.shape[0]).flip(0) * stride + arena.numel() // ARENA_UNIT
    grown = arena.new_zeros((records.shape[0] + 1) * stride * ARENA_UNIT)
    arena = torch.cat([arena, grown])
    store_blocks(Target(arena, ids.int(), base), records)
    return arena, ids.int()


def random_kv(
    lengths: list[int], heads: int, head_dim: int, tokens: int
) -> tuple[Tensor, Tensor]:
    """Keys with a few loud channels, as models have them, and plain values."""
    count = -(-max(lengths) // tokens)
    shape = (len(lengths), heads, count * tokens, head_dim)
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    loud = 1 + 3 * (torch.arange(head_dim) % 17 == 3)
    k = torch.randn(shape, generator=generator) * loud + 0.5 * loud
    return k, torch.randn(shape, generator=generator)


def sequence_kv(
    n: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """k and v [H, n, D] of one sequence, as of `random_kv`; n is filled up to whole pages."""
    k, v = random_kv([n], heads, head_dim, T)
    return k[0].to(dtype), v[0].to(dtype)


def place(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks [B, P, H, block_bytes] at shuffled addresses: the arena and pages [B, P]."""
    batch, count = blocks.shape[:2]
    stride = -(-(BASE + blocks[0, 0].numel()) // ARENA_UNIT)
    generator = torch.Generator().manual_seed(batch * count)
    pages = (
        torch.randperm(batch * count + 1, generator=generator)[1:] * stride + 1
    ).int()
    arena = torch.zeros((batch * count + 2) * stride * ARENA_UNIT, dtype=torch.uint8)
    store_blocks(Target(arena, pages, BASE), blocks.flatten(0, 1))
    return arena, pages.view(batch, count)


def exact_attention(
    case: Case, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """o [B, M, Hq, D] and lse [B, M, Hq] in fp64 from the K and V that the pages hold."""
    k = case.k.double()
    v = case.v.double()
    width = case.q.shape[2] // k.shape[1]
    k = k.repeat_interleave(width, 1)
    v = v.repeat_interleave(width, 1)
    scores = torch.einsum("bmhd,bhnd->bmhn", case.q.double(), k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    position = torch.arange(k.shape[2])
    lo = case.view.lo[..., None]
    hi = case.view.hi[..., None]
    visible = ((position >= lo) & (position < hi)).unsqueeze(2)
    if case.present is not None:
        visible = visible & case.present.repeat_interleave(width, 1).unsqueeze(1)
    scores = scores.masked_fill(~visible, -torch.inf)
    p = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bmhn,bhnd->bmhd", p, v), scores.logsumexp(-1)


def are_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def assert_alike(
    answer: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    tolerance: float,
    near: float = 1e-5,
    rtol: float = 1e-6,
) -> None:
    """An answer and its lse are as expected; a query that sees nothing has 0 and minus infinity.

    tolerance: of the whole answer, relative
    near, rtol: of each lse, absolute and relative
    """
    o, lse = answer
    expected_o, expected_lse = expected
    sees = expected_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, sees)
    assert torch.allclose(
        lse[sees].double(), expected_lse[sees].double(), rtol=rtol, atol=near
    )
    assert (o.double() - expected_o).norm() <= tolerance * expected_o.norm()
    assert not o[~sees].any()
