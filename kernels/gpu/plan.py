"""How attention is launched on a GPU, in plain numbers: shapes, options, and units of work.

    sequence 0            sequence 1   sequence 2
    |  u0  |  u1  |  u2  |     u3     |  u4  |  u5  |        a program each; and for every KV head
     pages  pages  tail   pages         pages  tail

A unit is some tiles (a page, or a few exact ones) of one view of one sequence, and of one segment
where pages share segments: so that what a segment shares is absorbed into the query once. Units of
a run are equally long. The host, which knows all lengths, makes the table of them once for a step;
recorded steps take tables of other lengths, in a buffer for as many as `most_units` says. Knows no
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
)
from disagg.kernels.view import Table, View, WorkPlan

NVIDIA = torch.version.hip is None
NVIDIA_COLUMNS = 8  # columns of a tensor-core product of 16 rows
AMD_COLUMNS = 16
TENSOR_COLUMNS = NVIDIA_COLUMNS if NVIDIA else AMD_COLUMNS
NVIDIA_SHARED_BYTES = (
    96 << 10
)  # what consumer chips have too; data-centre chips have twice that
AMD_SHARED_BYTES = 64 << 10
MAX_SLOTS = 2  # sparse ones of a column, beside codes and low rank
MAX_GRID = 65_535  # programs along the last axis
MIN_TILES = 4  # fewer cost more in partial results than they win in parallel reads
FLOAT8_CAPABILITY = (8, 9)  # the first NVIDIA chips that convert float8

LoopFormat = ExactFormat | PageFormat
Ints = NDArray[np.signedinteger]


@dataclass(frozen=True)
class Shape:
    """What a kernel needs to know of the queries.

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
    """The shape for so many queries of each sequence; columns: of the tensor core.

    Where half of them are enough, each query takes two in pages of codes: both are the same for K,
    so that no thread holds a score twice, and they carry two groups of channels of V. Of many
    channels the sums of more queries would not fit the registers: other programs take these.
    """
    if not isinstance(fmt, PageFormat):
        return Shape(group, columns)
    groups = fmt.head_dim // fmt.v.scale.group if fmt.v.scale.by == "column" else 1
    pairs = groups % 2 == 0 and fmt.v.fields % groups == 0
    wide = columns == NVIDIA_COLUMNS and fmt.head_dim > NARROW
    if pairs and (wide or queries * group <= columns // 2):
        return Shape(group, columns // 2, 2, 2)
    return Shape(group, columns)


def compile_options(fmt: LoopFormat, nvidia: bool) -> dict[str, int | bool]:
    """What the compiler is told; fmt: of the pages that are read most.

    Left alone, ptxas stops at 168 registers for some kernels and spills (Triton 3.9).
    """
    options: dict[str, int | bool] = {"num_warps": 1, "enable_fp_fusion": True}
    return (
        options | {"num_warps": tile_of(fmt).warps, "maxnreg": 255}
        if nvidia
        else options
    )


def warps_of(head_dim: int, banded: bool = False) -> int:
    """Warps of a program on an NVIDIA chip: one, so that the softmax never crosses warps. Its
    registers hold the sums of 256 channels only where K comes in bands, one after another; else
    there are two warps: each has half of the sums, and both make all scores."""
    return 1 if head_dim <= NARROW or banded else 2


def pipeline_stages(fmt: LoopFormat, nvidia: bool, beside: bool) -> int:
    """Stages of the loop over tiles: 3 keep two tiles loaded or on their way, 2 keep one.

    Raw pages beside others, of tails and of tokens kept, are few: buffers for them would keep other
    programs from running, so they have none; but of many channels one, since loads that wait in
    registers would spill. Of pages with low-rank bases of their own two spill.
    """
    if beside and isinstance(fmt, ExactFormat) and fmt.slots == RAW_SLOTS:
        return 1 if fmt.head_dim <= NARROW else 2
    if beside and isinstance(fmt, PageFormat) and fmt.has_own_basis:
        return 2
    return _stages(tile_of(fmt).nbytes, nvidia)


def is_supported(fmt: PageFormat) -> bool:
    """Whether the kernel attends to such pages; the reference does to any."""
    k, v = fmt.k, fmt.v
    if (
        v.scale.by == "row"
        or v.scale.shared
        or (v.scale.by == "block" and v.scale.center)
    ):
        return False
    if fmt.hadamard:
        return (
            fmt.tokens == 64
            and fmt.head_dim <= 256
            and fmt.head_dim & (fmt.head_dim - 1) == 0
        )
    if k.scale.by == "column" and k.fields % (k.rows // k.scale.group):
        return False
    if fmt.tokens & (fmt.tokens - 1) or fmt.head_dim % 16:
        return False
    if (k.sparse or v.sparse) and fmt.head_dim & (fmt.head_dim - 1):
        return False
    return all(_is_turnable(side, fmt.head_dim) for side in (k, v))


def converts_float8(device: torch.device) -> bool:
    """Whether a device has an instruction for it; an interpreter has none."""
    if device.type != "cuda" or not NVIDIA:
        return False
    return torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def check_tables(*tables: Tensor | None) -> None:
    """Refuse what a kernel would misread."""
    for x in tables:
        if x is not None and not (
            x.is_contiguous() and x.dtype in (torch.float32, torch.int32)
        ):
            raise ValueError("q fp32 and int32 tables are wanted, contiguous in memory")


@dataclass(frozen=True)
class Tile:
    """What one iteration takes of each KV head: tokens and bytes.

    counted: its tokens follow from where it is, so a window hides whole tiles
    warps:   of a program that takes it
    """

    tokens: int
    nbytes: int
    counted: bool = True
    warps: int = 1


def tile_of(fmt: Format) -> Tile:
    """A page, or a few exact ones."""
    if isinstance(fmt, ExactFormat):
        count, warps = fmt.tile_pages, warps_of(fmt.head_dim)
        return Tile(fmt.tokens * count, fmt.block_bytes * count, fmt.counted, warps)
    banded = isinstance(fmt, PageFormat) and bool(fmt.bands)
    return Tile(fmt.tokens, fmt.block_bytes, warps=warps_of(fmt.head_dim, banded))


@dataclass(frozen=True)
class Span:
    """What B sequences show of one view, to be cut for so many programs of a GPU for each KV head.

    lo, hi: [B] - the tokens, or slots, that any query of each sequence sees; most: hi at most
    owner:  [B, P], segments: [B, S] - as `Table` has them
    """

    tile: Tile
    lo: Ints
    hi: Ints
    most: int
    owner: Ints | None = None
    segments: Ints | None = None

    @classmethod
    def of(cls, table: Table) -> "Span":
        """What a table shows; a GPU is asked for the lengths in its own."""
        shared = (
            None if x is None else x.cpu().numpy()
            for x in (table.owner, table.segments)
        )
        first, end = table.lo.amin(1).cpu().numpy(), table.hi.amax(1).cpu().numpy()
        fmt, most = table.fmt, table.pages.shape[1] * table.fmt.tokens
        if isinstance(fmt, ExactFormat) and fmt.side is not None:
            slots = min(most, fmt.side.slots)
            first, end = np.zeros_like(first), np.where(end > first, slots, 0)
        return cls(tile_of(fmt), first, end, most, *shared)

    def most_units(self, programs: int) -> int:
        """Units of as many sequences at most, that show no more; pages sealed while decoding may be
        of the first segment again."""
        batch, tiles = len(self.lo), -(-self.most // self.tile.tokens)
        runs = 1 if self.segments is None else self.segments.shape[1] + 1
        return batch * runs + min(programs, batch * tiles // MIN_TILES)

    def units(self, programs: int) -> Ints:
        """Sequence, first and end tile and segment of each unit: [U, 4] int32."""
        first = (
            self.lo // self.tile.tokens if self.tile.counted else np.zeros_like(self.lo)
        )
        end = np.where(self.hi > self.lo, -(-self.hi // self.tile.tokens), first)
        batch = np.arange(len(self.lo))
        ids = np.zeros_like(batch)
        owner, segments = self.owner, self.segments
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
    programs, batch = _programs(spans, heads, device), len(spans[0].lo)
    units = np.concatenate(
        [np.insert(x.units(programs), 0, i, 1) for i, x in enumerate(spans)]
    )
    units = units[np.argsort(units[:, 1], kind="stable")]
    starts = np.zeros(batch + 1, dtype=np.int32)
    starts[1:] = np.cumsum(np.bincount(units[:, 1], minlength=batch))
    return (units if len(units) else np.zeros((1, 5), dtype=np.int32)), starts


def most_units(spans: Sequence[Span], heads: int, device: torch.device) -> int:
    """Units of as many sequences at most, that show no more of each view; at most MAX_GRID."""
    programs = _programs(spans, heads, device)
    return min(MAX_GRID, sum(span.most_units(programs) for span in spans))


def _programs(spans: Sequence[Span], heads: int, device: torch.device) -> int:
    """What a device runs at once for each KV head: 8 warps are resident by registers, and programs
    as often as there is memory for the pages of the first view."""
    tile = spans[0].tile
    buffered = (_stages(tile.nbytes, True) - 1) * tile.nbytes
    resident = max(1, min(8 // tile.warps, 2 * NVIDIA_SHARED_BYTES // buffered))
    return max(1, resident * count_processors(device) // heads)


def units_of(views: Sequence[View], device: torch.device) -> WorkPlan:
    """The units of views, where nobody planned them; the host asks for all lengths."""
    found = units_of_spans([Span.of(view) for view in views], views[0].heads, device)
    return WorkPlan(*(torch.from_numpy(x).to(device) for x in found))


def count_processors(device: torch.device) -> int:
    """Streaming multiprocessors; one in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _runs(owner: Ints, first: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Row, first and end page of runs of equal owners, from page first[b] to end[b] of row b."""
    page = np.arange(owner.shape[1])
    begins = np.diff(owner, prepend=-1) != 0
    begins = (
        (begins | (page == first[:, None]))
        & (page >= first[:, None])
        & (page < end[:, None])
    )
    batch, starts = np.nonzero(begins)
    follows = np.append(batch[1:] == batch[:-1], False)  # another one in the same row
    return batch, starts, np.where(follows, np.append(starts[1:], 0), end[batch])


def _stages(nbytes: int, nvidia: bool) -> int:
    shared = NVIDIA_SHARED_BYTES if nvidia else AMD_SHARED_BYTES
    return 3 if 2 * nbytes + 2048 <= shared else 2


def _is_turnable(side: Side, head_dim: int) -> bool:
    """Whether the rotation of a side, if it has one, stays within tiles; and ranks fit one."""
    if side.low_rank and (side.rotation or side.low_rank.rank > 16):
        return False
    if not side.rotation:
        return True
    within = head_dim // (4 if side.rows == head_dim else side.halves)
    return head_dim & (head_dim - 1) == 0 and within % side.rotation.block == 0


def check_slots(fmt: PageFormat) -> None:
    """Refuse sparse slots whose loop over pages does not fit the registers of an NVIDIA GPU."""
    slots = max(
        (side.sparse.slots for side in (fmt.k, fmt.v) if side.sparse), default=0
    )
    if slots > MAX_SLOTS:
        raise ValueError(
            f"{slots} sparse slots for each column of a page; {MAX_SLOTS} fit the registers of a "
            "GPU: less sparsity has fewer, gear-l none"
        )


def check_tile(fmt: ExactFormat) -> None:
    """Refuse pages that fill more than a tile."""
    most = STRIP * TILE_STRIPS
    if fmt.slots > most:
        raise ValueError(f"pages of {fmt.slots} slots; at most {most} are known")
    if fmt.counted and fmt.slots != fmt.strips * STRIP:
        raise ValueError(
            f"{fmt.slots} slots without positions; whole strips are wanted"
        )
