"""Pages made of pieces: what attention on any compressed page reads. No codec by name.

Both K and V of a block are a matrix [rows, columns] whose columns attention contracts: K has its
tokens as rows and its channels as columns, V the other way round. One description serves both.

    x[r, c] = scale * (code[r, c] + zero)        codes, with one of three kinds of scale
            + sum_i A B^T                        low rank: A in the page, B in the segment
            + delta where index[c, slot] == r    sparse slots of a column
    a rotated side is that times T_S, a matrix of the segment, block by block of channels

Offsets are bytes from the start of a block of the page, or of the segment where it says so.
"""

from dataclasses import dataclass
from functools import lru_cache

from disagg.kernels.formats import QuantFormat


@dataclass(frozen=True)
class Scale:
    """Scales and zeros of a side.

    by:     "column": [rows / group][columns], one for each column and group of rows; it goes into
            the vector that the codes are contracted with
            "row": [columns / group][rows], one for each row and group of columns; it multiplies
            the sum over these columns
            "block": [1][1], fp32, one for the side
    scale:  offset of the scales, fp16 unless by is "block"
    zero:   offset of the zeros, fp16, same shape; None: every zero is `center`
    shared: the offsets are in the segment's block; by is "column" and group is all rows
    """

    by: str
    group: int
    scale: int
    zero: int | None = None
    center: int = 0
    shared: bool = False

    def __post_init__(self) -> None:
        if self.by not in ("column", "row", "block"):
            raise ValueError(f"scales by {self.by!r}; column, row and block are known")


@dataclass(frozen=True)
class LowRank:
    """`a`: fp16 [tokens][rank] in the page; `b`: fp16 [head_dim][rank] in the segment."""

    rank: int
    a: int
    b: int


@dataclass(frozen=True)
class Sparse:
    """`slots` entries for each column: u8 [columns][slots] rows at `index`, fp16 at `delta`.

    ends: an encoder takes slots / 2 of the largest and of the smallest values of a column; else
          those farthest from the mean
    """

    slots: int
    index: int
    delta: int
    ends: bool = False


@dataclass(frozen=True)
class Rotation:
    """`matrix`: fp16 [block][block] in the segment; each `block` channels are multiplied by it."""

    block: int
    matrix: int


@dataclass(frozen=True)
class Side:
    """K or V of a block.

    bits:  2, 4 or 8
    codes: offset of the codes: int16 words [rows/planes][columns/halves], drawn in formats.py, with
           two planes and no halves for 8 bits; or float8_e4m3fn [rows][columns] where `floating`
    """

    rows: int
    columns: int
    bits: int
    codes: int
    scale: Scale
    low_rank: LowRank | None = None
    sparse: Sparse | None = None
    rotation: Rotation | None = None
    floating: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"codes of {self.bits} bits; 2, 4 and 8 are known")

    @property
    def planes(self) -> int:
        """Bit-fields of a code word along the rows; 1 for floats, which are not in words."""
        return 1 if self.floating else min(4, 16 // self.bits)

    @property
    def halves(self) -> int:
        """Parts of the columns that share a code word."""
        return 1 if self.floating else 16 // (self.planes * self.bits)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """The shape of the planes of scales and zeros."""
        if self.scale.by == "column":
            return self.rows // self.scale.group, self.columns
        if self.scale.by == "row":
            return self.columns // self.scale.group, self.rows
        return 1, 1


@dataclass(frozen=True)
class PagedFormat:
    """A block of a page, and of the segment it belongs to.

    segment_bytes: of a segment's block; 0 where no piece is shared
    valid:         offset of a bit for each token, u8 [tokens / 8], low bit first; a token whose bit
                   is 0 is not there; None: all are
    """

    tokens: int
    head_dim: int
    block_bytes: int
    segment_bytes: int
    k: Side
    v: Side
    valid: int | None = None


@lru_cache
def as_paged(fmt: QuantFormat) -> PagedFormat:
    """The same page, as pieces."""
    k = Scale("column", fmt.k_group, fmt.k_scale, fmt.k_zero)
    v = Scale("column", fmt.v_group, fmt.v_scale, fmt.v_zero)
    return PagedFormat(
        tokens=fmt.tokens,
        head_dim=fmt.head_dim,
        block_bytes=fmt.block_bytes,
        segment_bytes=0,
        k=Side(fmt.tokens, fmt.head_dim, fmt.bits, fmt.k_codes, k),
        v=Side(fmt.head_dim, fmt.tokens, fmt.bits, fmt.v_codes, v),
    )


def is_encodable(fmt: PagedFormat) -> bool:
    """Whether kernels seal pages of this format; the reference seals any."""
    k, v = fmt.k.low_rank, fmt.v.low_rank
    if (k or v or fmt.valid is not None) and fmt.tokens & (fmt.tokens - 1):
        return False
    if k is None or v is None:
        return k is v
    return k.rank == v.rank <= 16 and fmt.head_dim <= 256


def written_bytes(fmt: PagedFormat) -> int:
    """Bytes of the planes of a block: where they are fewer than its own, planes leave gaps."""
    total = 0 if fmt.valid is None else fmt.tokens // 8
    for side in (fmt.k, fmt.v):
        total += side.rows * side.columns * side.bits // 8
        if not side.scale.shared:
            scales = side.scale_shape[0] * side.scale_shape[1]
            total += scales * (16 if side.floating else 2 if side.scale.zero is None else 4)
        total += 2 * fmt.tokens * side.low_rank.rank if side.low_rank else 0
        total += 3 * side.columns * side.sparse.slots if side.sparse else 0
    return total
