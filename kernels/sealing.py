"""Where tokens and the pages that they fill are written: what appends and encoders are told.

    row of the step     0     1    2    3
    pages              -1    96   -1   -1   row 1 fills a tail, whose first T tokens become page 96
    tails               ·   8 ids  ·    ·   the raw pages that they are in now
    segments            ·   112    ·    ·   the segment that it joins, where the format has segments
    stretches           ·    40    ·    ·   first position / 16: where power iterations start

There is a row for every new token, so that the shapes stay the same from step to step and a CUDA
graph can repeat them. The last token of a page may be the row's own; it is never another row's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.kernels.formats import ARENA_UNIT, ExactFormat, PageFormat

NO_PAGE = (
    -1
)  # of a row that completes no page, and of one that is padding and not written
STRETCH_TOKENS = 16  # every segment begins at a multiple of this
HEAD_STRIDE = (
    256  # seeds of a segment: one for each side and head, however many heads a call has
)


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
    """Blocks [P, H, block_bytes] u8, one page after another."""
    count, heads, block_bytes = blocks.shape
    pages = torch.arange(count, dtype=torch.int32, device=blocks.device)
    return Target(blocks.view(-1), pages, unit=heads * block_bytes)


@dataclass(frozen=True)
class Segmentation:
    """How consecutive tokens are cut into segments, and what those begin with.

    tokens: of a segment, a multiple of 16; the last one may have fewer
    seed:   of the first segment; that of the next one is as many stretches more
    frozen: [H, segment_bytes] u8 - a segment that new ones repeat: its rotation is kept, and its
            order and signs, which no encoder makes. None: new ones are made
    """

    tokens: int = 2048
    seed: int = 0
    frozen: Tensor | None = None

    def count(self, tokens: int) -> int:
        """Segments of so many tokens; no tokens are one segment too."""
        return max(1, -(-tokens // self.tokens))

    def begin(
        self, tokens: int, heads: int, fmt: PageFormat, device: torch.device
    ) -> Tensor:
        """The segments of so many tokens [S, H, segment_bytes] u8: as they are frozen, else 0."""
        if fmt.hadamard and self.frozen is None:
            raise ValueError(
                "a frozen segment is wanted: it says the order of K's channels"
            )
        shape = (self.count(tokens), heads, fmt.segment_bytes)
        segments = torch.zeros(shape, dtype=torch.uint8, device=device)
        return segments if self.frozen is None else segments.copy_(self.frozen)

    def seeds(self, tokens: int) -> list[int]:
        """Of each segment."""
        step = self.tokens // STRETCH_TOKENS
        return [self.seed + i * step for i in range(self.count(tokens))]


@dataclass(frozen=True)
class NewRows:
    """The raw page and slot of every new token of a step, in one layer.

    pages: [N] int32 - raw page ids, or NO_PAGE for a row that is not written
    slots: [N] int32 - which of their tokens; no two rows have one in common
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
    """

    rows: SealRows
    fmt: PageFormat
    base: int
    segment_base: int = 0
    seed: int = 0
