"""Pages that an append completes: what it is told of them. Knows no codec by name.

    row of the step     0     1    2    3
    pages              -1    96   -1   -1   row 1 fills a tail, whose first T tokens become page 96
    tails               ·   8 ids  ·    ·   the raw pages that they are in now
    segments            ·   112    ·    ·   its segment, where the format has segments
    stretches           ·    40    ·    ·   first position / 16: where power iterations start

There is a row for every new token, so that the shapes stay the same from step to step and a CUDA
graph can repeat them. The last token of a page may be the row's own; it is never another row's.
"""

from dataclasses import dataclass

from torch import Tensor

from disagg.kernels.formats_aligned import AlignedFormat
from disagg.kernels.formats_paged import PagedFormat, is_encodable, written_bytes
from disagg.kernels.reference_dropped import DroppedFormat

SealFormat = PagedFormat | AlignedFormat | DroppedFormat

NO_PAGE = -1  # of a row that completes no page, and of one that is padding and not written
STRETCH_TOKENS = 16  # every segment begins at a multiple of this


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
    seed:               added to a stretch, it is the seed of a segment
    """

    rows: SealRows
    fmt: SealFormat
    base: int
    segment_base: int = 0
    seed: int = 0


def is_sealable(fmt: SealFormat) -> bool:
    """Whether an append can seal pages of this format: each by itself, in one tile of registers."""
    if not isinstance(fmt, PagedFormat):
        return not isinstance(fmt, DroppedFormat) or fmt.positions is None
    whole = fmt.valid is None and written_bytes(fmt) == fmt.block_bytes
    turned = fmt.k.rotation or fmt.v.rotation
    return whole and not turned and is_encodable(fmt)
