"""How attention is launched on a GPU, in plain numbers: shapes, options, and units of work.

    sequence 0            sequence 1   sequence 2
    |  u0  |  u1  |  u2  |     u3     |  u4  |  u5  |        a program each; and for every KV head
     pages  pages  tail   pages         pages  tail

A unit is a run of tiles (a page, or a few exact ones) of one view of one sequence, and of one
segment where pages share segments, so that a segment's data is absorbed into the query once. Units
of a run are equally long. The host, which knows all lengths, makes their table once per step;
CUDA graphs replay steps with tables of other lengths, in a buffer of `most_units` rows. Knows no
Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.kernels.formats import (
    NARROW,
    RAW_SLOTS,
    STRIP,
    TILE_STRIPS,
    ExactFormat,
    Format,
    PageFormat,
    Side,
    latent_of,
    value_dim,
)
from disagg.kernels.view import Table, View, WorkPlan

NVIDIA = torch.version.hip is None
NVIDIA_COLUMNS = 8  # columns of a tensor-core product of 16 rows
AMD_COLUMNS = 16
TENSOR_COLUMNS = NVIDIA_COLUMNS if NVIDIA else AMD_COLUMNS
# what consumer chips have too; data-centre chips have twice that
NVIDIA_SHARED_BYTES = 96 << 10
AMD_SHARED_BYTES = 64 << 10
LATENT_ROWS = 64  # queries of a program over latents: the rows of a product of sm_90
LATENT_WARPS = 8  # two warpgroups, each with half of the sums
LATENT_CAPABILITIES = (9,)  # of chips with room for tiles, 227 KB, and wgmma
MOST_LATENT = 512  # channels, whose sums fill half of the registers
MOST_ROTATED = 128
ROW_GROUPS = (16, 32, 64, 128)  # channels that divide a part of a latent
MAX_SLOTS = 2  # sparse ones of a column, beside codes and low rank
MAX_GRID = 65_535  # programs along the last axis
MIN_TILES = 4  # fewer cost more in partial results than they win in parallel reads
FLOAT8_CAPABILITY = (8, 9)  # the first NVIDIA chips that convert float8

LoopFormat = ExactFormat | PageFormat
Ints = NDArray[np.signedinteger]


@dataclass(frozen=True)
class Shape:
    """How a program's queries fill the tensor cores.

    group:   query heads of a KV head
    columns: C, queries times heads of one program
    copies:  how often each column is repeated in the product with K, to fill the tensor core
    groups:  V groups that lie side by side in the product with V, likewise
    """

    group: int
    columns: int
    copies: int = 1
    groups: int = 1

    def blocks(self, queries: int) -> int:
        """Programs that share the queries of a sequence and KV head."""
        return -(-queries * self.group // self.columns)


def shape_of(fmt: Format, queries: int, group: int, columns: int) -> Shape:
    """The shape for this many queries of each sequence; columns: of the tensor core.

    Where half of the columns are enough, each query takes two of them in pages of codes: both are
    the same for K, so that no thread holds a score twice, and they carry two groups of channels of
    V. With many channels the sums of more queries would not fit the registers: other programs take
    these queries.
    """
    if latent_of(fmt):
        return Shape(group, LATENT_ROWS)
    if not isinstance(fmt, PageFormat):
        return Shape(group, columns)
    groups = (
        fmt.head_dim // fmt.values.scale.group if fmt.values.scale.by == "column" else 1
    )
    pairs = groups % 2 == 0 and fmt.values.fields % groups == 0
    wide = columns == NVIDIA_COLUMNS and fmt.head_dim > NARROW
    if pairs and (wide or queries * group <= columns // 2):
        return Shape(group, columns // 2, 2, 2)
    return Shape(group, columns)


def compile_options(fmt: LoopFormat, nvidia: bool) -> dict[str, int | bool]:
    """Options of the compiler; fmt: of the pages that are read most.

    Left alone, ptxas stops at 168 registers for some kernels and spills (Triton 3.9).
    """
    options: dict[str, int | bool] = {"num_warps": 1, "enable_fp_fusion": True}
    if nvidia:
        options["num_warps"] = tile_of(fmt).warps
        options["maxnreg"] = 255
    return options


def warps_of(head_dim: int, banded: bool = False) -> int:
    """Warps of a program on an NVIDIA chip: one, so that the softmax never crosses warps.

    The registers of one warp hold the sums of 256 channels only where K comes in bands, one after
    another. Else there are two warps: each has half of the sums, and both compute all scores.
    """
    return 1 if head_dim <= NARROW or banded else 2


def pipeline_stages(fmt: LoopFormat, nvidia: bool, beside: bool) -> int:
    """Stages of the loop over tiles: 3 keep two tiles loaded or in flight, 2 keep one.

    Raw pages beside others, of tails and outliers, are few: buffers for them would keep other
    programs from running, so they have none. With many channels they have one, since loads that
    wait in registers would spill. Pages with low-rank bases of their own have one, since two spill.
    """
    if latent_of(fmt):
        return 2
    if beside and isinstance(fmt, ExactFormat) and fmt.slots == RAW_SLOTS:
        return 1 if fmt.head_dim <= NARROW else 2
    if beside and isinstance(fmt, PageFormat) and fmt.has_own_basis:
        return 2
    return _stages(tile_of(fmt).nbytes, nvidia)


def is_supported(fmt: Format, device: torch.device | None = None) -> bool:
    """Whether the kernel attends to such pages, on a device; the reference does to any."""
    if latent_of(fmt):
        return _is_supported_latent(fmt) and (device is None or holds_latents(device))
    return not isinstance(fmt, PageFormat) or _is_supported_page(fmt)


def _is_supported_page(fmt: PageFormat) -> bool:
    k = fmt.k
    v = fmt.values
    if not _has_supported_values(v):
        return False
    if fmt.hadamard:
        return fmt.tokens == 64 and fmt.head_dim <= 256 and _is_power_of_2(fmt.head_dim)
    if k.scale.by == "column" and k.fields % (k.rows // k.scale.group):
        return False
    if not _is_power_of_2(fmt.tokens) or fmt.head_dim % 16:
        return False
    return all(_fits_tiles(side, fmt.head_dim) for side in (k, v))


def holds_latents(device: torch.device) -> bool:
    """Whether the tiles of latents fit the shared memory of a device: that of sm_90 and sm_100."""
    if device.type != "cuda":
        return True
    return NVIDIA and torch.cuda.get_device_capability(device)[0] in LATENT_CAPABILITIES


def _is_supported_latent(fmt: Format) -> bool:
    latent = value_dim(fmt)
    fits = latent <= MOST_LATENT and fmt.head_dim - latent <= MOST_ROTATED
    if not fits or fmt.head_dim % 8:
        return False
    if isinstance(fmt, ExactFormat):
        return fmt.counted and fmt.dtype != "float32"
    return isinstance(fmt, PageFormat) and _are_latent_codes_supported(fmt, latent)


def _are_latent_codes_supported(fmt: PageFormat, latent: int) -> bool:
    if fmt.tokens != RAW_SLOTS * TILE_STRIPS or fmt.valid is not None:
        return False
    side = fmt.k
    scale = side.scale
    if scale.by == "column":
        return side.fields % (side.rows // scale.group) == 0
    is_grouped = scale.by == "row" and scale.group < side.columns
    return not is_grouped or (latent % scale.group == 0 and scale.group in ROW_GROUPS)


def _has_supported_values(v: Side) -> bool:
    scale = v.scale
    if scale.by == "row" or scale.shared:
        return False
    return scale.by == "column" or not scale.center


def _is_power_of_2(n: int) -> bool:
    return n & (n - 1) == 0


def converts_float8(device: torch.device) -> bool:
    """Whether a device has an instruction that converts float8; an interpreter has none."""
    if device.type != "cuda" or not NVIDIA:
        return False
    return torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def check_tables(*tables: Tensor | None) -> None:
    """Refuse tables that a kernel would misread."""
    for x in tables:
        if x is None:
            continue
        if not x.is_contiguous() or x.dtype not in (torch.float32, torch.int32):
            raise ValueError("expected q fp32 and int32 tables, contiguous in memory")


@dataclass(frozen=True)
class Tile:
    """The tokens and bytes of each KV head that one iteration reads.

    counted: the tokens are those of consecutive positions, so a window hides whole tiles
    warps:   of a program that reads it
    """

    tokens: int
    nbytes: int
    counted: bool = True
    warps: int = 1


def tile_of(fmt: Format) -> Tile:
    """The tile of a format: a page, or a few exact ones."""
    if isinstance(fmt, ExactFormat):
        count = fmt.tile_pages
        warps = LATENT_WARPS if fmt.latent else warps_of(fmt.head_dim)
        return Tile(fmt.tokens * count, fmt.block_bytes * count, fmt.counted, warps)
    if latent_of(fmt):
        return Tile(fmt.tokens, fmt.block_bytes, warps=LATENT_WARPS)
    banded = isinstance(fmt, PageFormat) and bool(fmt.bands)
    return Tile(fmt.tokens, fmt.block_bytes, warps=warps_of(fmt.head_dim, banded))


@dataclass(frozen=True)
class Span:
    """The visible part of one view of B sequences, to be cut into units of work.

    lo, hi:   [B] - the tokens, or slots, that any query of each sequence sees
    most:     the largest hi that the table can hold
    owner:    [B, P] - as in `Table`
    segments: [B, S] - as in `Table`
    """

    tile: Tile
    lo: Ints
    hi: Ints
    most: int
    owner: Ints | None = None
    segments: Ints | None = None

    @classmethod
    def of(cls, table: Table) -> "Span":
        """The visible part of a table; a table on a GPU waits for that GPU."""
        owner = None if table.owner is None else table.owner.cpu().numpy()
        segments = None if table.segments is None else table.segments.cpu().numpy()
        first = table.lo.amin(1).cpu().numpy()
        end = table.hi.amax(1).cpu().numpy()
        fmt = table.fmt
        most = table.pages.shape[1] * table.fmt.tokens
        if isinstance(fmt, ExactFormat) and fmt.side is not None:
            slots = min(most, fmt.side.slots)
            end = np.where(end > first, slots, 0)
            first = np.zeros_like(first)
        return cls(tile_of(fmt), first, end, most, owner, segments)

    def most_units(self, programs: int) -> int:
        """The most units that this many sequences of at most `most` tokens can have.

        Pages that are sealed while decoding may belong to the first segment again.
        """
        batch = len(self.lo)
        tiles = -(-self.most // self.tile.tokens)
        runs = 1 if self.segments is None else self.segments.shape[1] + 1
        return batch * runs + min(programs, batch * tiles // MIN_TILES)

    def units(self, programs: int) -> Ints:
        """Sequence, first and end tile and segment of each unit: [U, 4] int32."""
        first = np.zeros_like(self.lo)
        if self.tile.counted:
            first = self.lo // self.tile.tokens
        end = np.where(self.hi > self.lo, -(-self.hi // self.tile.tokens), first)
        batch = np.arange(len(self.lo))
        ids = np.zeros_like(batch)
        owner = self.owner
        segments = self.segments
        if owner is not None and segments is not None:
            batch, first, end = _runs(owner, first, end)
            ids = segments[batch, owner[batch, first]]
        tiles = np.maximum(end - first, 0)
        longest = max(-(-int(tiles.sum()) // programs), MIN_TILES)
        count = -(-tiles // longest)
        run = np.repeat(np.arange(len(tiles)), count)
        index = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
        size = -(-tiles // np.maximum(count, 1))
        start = first[run] + index * size[run]
        stop = np.minimum(start + size[run], end[run])
        return np.stack([batch[run], start, stop, ids[run]], 1).astype(np.int32)


def units_of_spans(
    spans: Sequence[Span], heads: int, device: torch.device
) -> tuple[Ints, Ints]:
    """The tables of `WorkPlan` over all views, int32."""
    programs = _programs(spans, heads, device)
    batch = len(spans[0].lo)
    of_views = [np.insert(x.units(programs), 0, i, 1) for i, x in enumerate(spans)]
    units = np.concatenate(of_views)
    units = units[np.argsort(units[:, 1], kind="stable")]
    starts = np.zeros(batch + 1, dtype=np.int32)
    starts[1:] = np.cumsum(np.bincount(units[:, 1], minlength=batch))
    if not len(units):
        units = np.zeros((1, 5), dtype=np.int32)
    return units, starts


def most_units(spans: Sequence[Span], heads: int, device: torch.device) -> int:
    """The most units that this many sequences can have in views of this size; at most MAX_GRID."""
    programs = _programs(spans, heads, device)
    return min(MAX_GRID, sum(span.most_units(programs) for span in spans))


def _programs(spans: Sequence[Span], heads: int, device: torch.device) -> int:
    """Programs that a device runs at once for each KV head.

    Registers limit them to 8 warps per processor, shared memory to as many as can buffer pages of
    the first view.
    """
    tile = spans[0].tile
    buffered = (_stages(tile.nbytes, True) - 1) * tile.nbytes
    resident = max(1, min(8 // tile.warps, 2 * NVIDIA_SHARED_BYTES // buffered))
    return max(1, resident * count_processors(device) // heads)


def units_of(views: Sequence[View], device: torch.device, blocks: int = 1) -> WorkPlan:
    """A plan for views that have none; the host waits for all lengths.

    blocks: programs that share a unit and a KV head
    """
    spans = [Span.of(view) for view in views]
    table, starts = units_of_spans(spans, views[0].heads * blocks, device)
    return WorkPlan(
        table=torch.from_numpy(table).to(device),
        starts=torch.from_numpy(starts).to(device),
    )


def count_processors(device: torch.device) -> int:
    """Streaming multiprocessors; one in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _runs(owner: Ints, first: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Row, first and end page of runs of equal owners, from page first[b] to end[b] of row b."""
    page = np.arange(owner.shape[1])
    begins = np.diff(owner, prepend=-1) != 0
    begins |= page == first[:, None]
    begins &= (page >= first[:, None]) & (page < end[:, None])
    batch, starts = np.nonzero(begins)
    follows = np.append(batch[1:] == batch[:-1], False)  # another one in the same row
    return batch, starts, np.where(follows, np.append(starts[1:], 0), end[batch])


def _stages(nbytes: int, nvidia: bool) -> int:
    shared = NVIDIA_SHARED_BYTES if nvidia else AMD_SHARED_BYTES
    return 3 if 2 * nbytes + 2048 <= shared else 2


def _fits_tiles(side: Side, head_dim: int) -> bool:
    """Whether the sparse slots, the rank and the rotation of a side, if any, fit tiles."""
    if side.sparse and not _is_power_of_2(head_dim):
        return False
    if side.low_rank and (side.rotation or side.low_rank.rank > 16):
        return False
    if not side.rotation:
        return True
    within = head_dim // (4 if side.rows == head_dim else side.halves)
    return _is_power_of_2(head_dim) and within % side.rotation.block == 0


def check_slots(fmt: PageFormat) -> None:
    """Refuse sparse slots whose loop over pages does not fit the registers of an NVIDIA GPU."""
    slots = 0
    for side in fmt.sides:
        if side.sparse:
            slots = max(slots, side.sparse.slots)
    if slots > MAX_SLOTS:
        raise ValueError(
            f"{slots} sparse slots for each column of a page; {MAX_SLOTS} fit the registers of a "
            "GPU: less sparsity has fewer, gear-l none"
        )


def check_tile(fmt: ExactFormat) -> None:
    """Refuse pages that fill more than a tile."""
    most = STRIP * TILE_STRIPS
    if fmt.slots > most:
        raise ValueError(f"pages of {fmt.slots} slots; expected at most {most}")
    if fmt.counted and fmt.slots != fmt.strips * STRIP:
        raise ValueError(f"{fmt.slots} slots without positions; expected whole strips")
