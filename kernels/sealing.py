"""Where new tokens and the pages that they fill are written: the tables of appends and encoders.

    row of the step     0     1    2    3
    pages              -1    96   -1   -1   row 1 fills a tail, whose first T tokens become page 96
    tails               ·   8 ids  ·    ·   the raw pages that they are in now
    segments            ·   112    ·    ·   the segment that it joins, where the format has segments
    stretches           ·    40    ·    ·   first position / 16: where power iterations start

There is a row for every new token, so that the shapes stay the same from step to step and a CUDA
graph can repeat them. The last token of a page may be the row's own, never that of another row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats import ARENA_UNIT, ExactFormat, PageFormat

# of a row that completes no page, and of one that is padding and not written
NO_PAGE = -1
STRETCH_TOKENS = 16  # every segment begins at a multiple of this
# seeds of a segment: one for each side and head of the model, however many heads a call has
HEAD_STRIDE = 256


@dataclass(frozen=True)
class Target:
    """The block of (page i, head) begins at byte pages[i] * unit + base + head * block_bytes.

    arena: [bytes] u8, contiguous; pages: [P] int32 - ids
    base:  offset of a layer page inside a page
    """

    arena: Tensor
    pages: Tensor
    base: int = 0
    unit: int = ARENA_UNIT


def in_order(blocks: Tensor) -> Target:
    """The target that is blocks [P, H, block_bytes] u8 themselves, one page after another."""
    count, heads, block_bytes = blocks.shape
    pages = torch.arange(count, dtype=torch.int32, device=blocks.device)
    return Target(blocks.view(-1), pages, unit=heads * block_bytes)


@dataclass(frozen=True)
class Segmentation:
    """How consecutive tokens are cut into segments, and what a segment begins with.

    tokens: of a segment, a multiple of 16; the last one may have fewer
    seed:   of the first segment; that of the next one is larger by a segment's stretches
    head:   the model's number of the first head
    frozen: [H, segment_bytes] u8 - a segment that new ones repeat: its rotation, and its order and
            signs, which no encoder makes. None: rotations are made anew
    """

    tokens: int = 2048
    seed: int = 0
    frozen: Tensor | None = None
    head: int = 0

    def count(self, tokens: int) -> int:
        """Segments that hold this many tokens; at least one."""
        return max(1, -(-tokens // self.tokens))

    def begin(
        self, tokens: int, heads: int, fmt: PageFormat, device: torch.device
    ) -> Tensor:
        """New segments for this many tokens [S, H, segment_bytes] u8: the frozen one, or zeros."""
        if fmt.hadamard and self.frozen is None:
            raise ValueError(
                "expected a frozen segment: it says the order of K's channels"
            )
        shape = (self.count(tokens), heads, fmt.segment_bytes)
        segments = torch.zeros(shape, dtype=torch.uint8, device=device)
        if self.frozen is not None:
            segments.copy_(self.frozen)
        return segments

    def seeds(self, tokens: int) -> list[int]:
        """The seed of each segment of this many tokens."""
        step = self.tokens // STRETCH_TOKENS
        return [self.seed + i * step for i in range(self.count(tokens))]


@dataclass(frozen=True)
class NewRows:
    """The raw page and slot of every new token of a step, in one layer.

    pages: [N] int32 - raw page ids, or NO_PAGE for a row that is not written
    slots: [N] int32 - the slot in that page; no two rows share one
    base:  offset of the layer's raw page inside a page
    """

    pages: Tensor
    slots: Tensor
    fmt: ExactFormat
    base: int


@dataclass(frozen=True)
class SealRows:
    """Which rows of a step complete a page: the tables drawn above, for N rows.

    pages, segments, stretches: [N] int32 · tails: [N, T/16] int32
    """

    pages: Tensor
    tails: Tensor
    segments: Tensor
    stretches: Tensor


@dataclass(frozen=True)
class Sealing:
    """How the pages of `rows` are written in one layer.

    base, segment_base: offsets of the layer page inside a page, and inside a segment
    seed:               added to a stretch, it is the seed of a power iteration
    head:               the model's number of the first head
    """

    rows: SealRows
    fmt: PageFormat
    base: int
    segment_base: int = 0
    seed: int = 0
    head: int = 0
