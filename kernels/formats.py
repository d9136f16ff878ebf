"""What a kernel knows of the bytes it reads and writes: numbers, not codecs and layouts by name.

    PageFormat      codes of K and V           pages of every codec that quantises
    ExactFormat     K and V in slots           raw pages and tails; outliers, heavy hitters
    AlignedFormat   fp16 cut into bit planes   AlignedKV

A block may hold a latent instead of K and V: V is then the first `latent` channels of K, has no
planes, and attention reads the same bytes twice: as rows for scores, as columns for values.

Offsets are bytes from the start of a block: the part of a page that one layer and one KV head own.
The block of (page, head) lies at `page * 128 + base + head * block_bytes` in the arena.
"""

from dataclasses import dataclass, replace

ARENA_UNIT = 128  # bytes; a page id counts these from the start of the arena
RAW_SLOTS = 16  # tokens of a raw page
HADAMARD_SIZE = 64  # channels of V that are mixed
STRIP = 16  # slots that are read together: the rows of a matrix product
TILE_STRIPS = 4  # strips that a GPU takes in one iteration
NARROW = 128  # channels up to which it takes that many; with more it takes half


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
    fitted: how an encoder chooses them, see reference/quantize.py: the range is clipped, and the
            scale then stretched; by is "column"
    """

    by: str
    group: int
    scale: int
    zero: int | None = None
    center: int = 0
    shared: bool = False
    fitted: bool = False

    def __post_init__(self) -> None:
        if self.by not in ("column", "row", "block"):
            raise ValueError(f"scales by {self.by!r}; expected column, row or block")


@dataclass(frozen=True)
class LowRank:
    """`a`: fp16 [tokens][rank] in the page; `b`: fp16 [head_dim][rank] in the segment, or in the
    page where it is not shared."""

    rank: int
    a: int
    b: int
    shared: bool = True


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
class BlockRotation:
    """`matrix`: fp16 [block][block] in the segment; each `block` channels are multiplied by it."""

    block: int
    matrix: int


def parts_of_word(bits: int) -> tuple[int, int]:
    """Fields along the rows and halves of the columns in a word of 16 bits, as `Side` draws it."""
    fields = min(4, 16 // bits)
    return fields, 16 // (fields * bits)


@dataclass(frozen=True)
class Side:
    """K or V of a block: a matrix whose columns attention contracts.

    K has its tokens as rows and its channels as columns, V the other way round, so that one
    description, and one piece of code, serves both:

        x[r, c] = scale * (code[r, c] + zero)        codes, with one of three kinds of scale
                + sum_i A B^T                        low rank: A in the page, B mostly not
                + delta where index[c, slot] == r    sparse slots of a column
        a rotated side is that times T_S, a matrix of the segment, block by block of channels

    A code word is 16 bits. The rows are cut into `fields`, one bit-field each; for 2 bits the
    columns are cut into two `halves`, the second one 8 bits up:

        word [r][c]   bit  field * bits + 8 * half   holds the code of
                      row  field * rows/fields + r,  column  half * columns/halves + c

    bits:     2, 4 or 8; 0: there are no codes and no zeros, and x[r, c] = scale[c], the mean of a
              column of fp16
    codes:    offset of int16 [rows/fields][columns/halves], or float8_e4m3fn [rows][columns]
    floating: whether codes are floats
    """

    rows: int
    columns: int
    bits: int
    codes: int
    scale: Scale
    low_rank: LowRank | None = None
    sparse: Sparse | None = None
    rotation: BlockRotation | None = None
    floating: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (0, 2, 4, 8):
            raise ValueError(f"codes of {self.bits} bits; expected 0, 2, 4 or 8")
        if self.rows % self.fields or self.columns % self.halves:
            raise ValueError(
                f"{self.rows} x {self.columns} codes of {self.bits} bits fill no words"
            )
        group = self.scale.group
        grouped = {"column": self.rows, "row": self.columns}.get(self.scale.by, 0)
        if group and grouped % group:
            raise ValueError(f"groups of {group} do not divide {grouped}")

    @property
    def fields(self) -> int:
        """Bit-fields of a code word along the rows; 1 for codes that are not in words."""
        fields, _ = self._parts
        return fields

    @property
    def lying(self) -> "Side":
        """K read as V: the same codes and scales, with rows and columns swapped."""
        by = {"column": "row", "row": "column"}.get(self.scale.by, self.scale.by)
        scale = replace(self.scale, by=by)
        return replace(self, rows=self.columns, columns=self.rows, scale=scale)

    @property
    def halves(self) -> int:
        """Parts of the columns that share a code word."""
        _, halves = self._parts
        return halves

    @property
    def _parts(self) -> tuple[int, int]:
        if self.floating or not self.bits:
            return 1, 1
        return parts_of_word(self.bits)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """The shape of the planes of scales and zeros."""
        if self.scale.by == "column":
            return self.rows // self.scale.group, self.columns
        if self.scale.by == "row":
            return self.columns // self.scale.group, self.rows
        return 1, 1


@dataclass(frozen=True)
class HadamardRotation:
    """How a segment orders K's channels and rotates V's.

    A kernel permutes q, and undoes the rotation of V on its output once.

        column c of K       holds channel order[c] & (head_dim - 1), of which the AND changes no
                            permutation; so score = sum_c q[order[c]] K[t, c]
        channel d of V      V[t] = rotate(v[t]), for each HADAMARD_SIZE channels, where
                            rotate(x) = y = H (s * x) / 8, undone by x = s * (H y) / 8
        s[d]                -1 where bit d of `signs` is 1, else 1
        H                   the Hadamard matrix of HADAMARD_SIZE channels in natural order, as
                            butterflies: for h = 1, 2, 4, 8, 16, 32: every pair (i, i + h) with
                            i & h == 0 becomes (a + b, a - b), each rounded to fp32; the division
                            by 8 is exact

    order: offset of int16 [head_dim] in the segment
    signs: offset of u8 [head_dim / 8] in the segment, low bit first; the same in all segments of a
           layer and KV head, so that a view can undo the rotation on the sum of them all
    """

    order: int
    signs: int


@dataclass(frozen=True)
class PageFormat:
    """Codes: a block of a page, and of the segment it belongs to.

    Planes of a page leave no gaps (one fp32 scale is written as four), so writing all planes writes
    the whole block.

    segment_bytes: of a segment's block; 0 where nothing is shared
    valid:         offset of a bit for each token, u8 [tokens / 8], low bit first; a token whose bit
                   is 0 is absent; None: all are present
    bands:         where K's columns are cut into bands of different widths: the sides of the bands
                   behind `k`, from its last column on. Their scales, and zeros, are planes one
                   behind the other, so one row of each serves all bands. By column, in groups of
                   all rows
    hadamard:      how K's channels are ordered and V's rotated; None: neither is
    latent:        V is the first so many channels of K, and `v` None; None: V is stored. K is codes
                   and scales alone then
    """

    tokens: int
    head_dim: int
    block_bytes: int
    segment_bytes: int
    k: Side
    v: Side | None
    valid: int | None = None
    bands: tuple[Side, ...] = ()
    hadamard: HadamardRotation | None = None
    latent: int | None = None

    def __post_init__(self) -> None:
        _check_latent(self.latent, self.v, self.head_dim)

    @property
    def k_sides(self) -> tuple[Side, ...]:
        """The bands of K's columns, all of them in order; one, unless there are `bands`."""
        return self.k, *self.bands

    @property
    def values(self) -> Side:
        """V, where it is stored."""
        if self.v is None:
            raise ValueError("pages of a latent store no V")
        return self.v

    @property
    def sides(self) -> tuple[Side, ...]:
        """All sides that are stored: the bands of K, then V."""
        return self.k_sides if self.v is None else (*self.k_sides, self.v)

    @property
    def has_own_basis(self) -> bool:
        """Whether a page holds both factors of its low-rank product, as if it were a segment."""
        products = [side.low_rank for side in self.sides]
        return any(low is not None and not low.shared for low in products)

    @property
    def is_encodable(self) -> bool:
        """Whether kernels seal such pages; the reference seals any."""
        if self.k.scale.shared and self.k.sparse:
            return False
        k_low = self.k.low_rank
        v_low = self.v.low_rank if self.v else None
        is_one_tile = bool(k_low or v_low or self.valid is not None)
        if is_one_tile and self.tokens & (self.tokens - 1):
            return False
        if k_low is None or v_low is None:
            return k_low is v_low
        return k_low.rank == v_low.rank <= 16 and self.head_dim <= 256

    @property
    def is_sealable(self) -> bool:
        """Whether an append can seal such a page.

        It does so in one tile of registers, from the page's own tokens and an order of channels.
        """
        needs_no_segment = not self.segment_bytes or self.hadamard is not None
        return self.valid is None and needs_no_segment and self.is_encodable


@dataclass(frozen=True)
class SlotsFormat:
    """A side record that says which tokens the slots of raw pages hold; planes of `slots` items.

    positions: int32
    scores:    float32
    states:    uint8, FREE, POOL or RETIRED
    """

    slots: int
    block_bytes: int
    positions: int
    scores: int
    states: int


FREE = 0  # holds no token
POOL = 1  # one of the best so far
RETIRED = 2  # beaten, but kept


@dataclass(frozen=True)
class ExactFormat:
    """K and V [slots][head_dim] of dtype in a block, which stands for `tokens` tokens.

    Which token is in slot s of page column p of a table:

        raw pages and tails     token p * tokens + s
        heavy hitters           positions of the page: int32 [slots], from the first token on
        outliers kept exact     positions of the side record, of all slots of the table in order

    dtype:     "float16", "bfloat16" or "float32"
    k, v:      offsets in the block
    positions: offset in the block
    side:      the format of the side record
    latent:    V is the first so many channels of K, and `v` None; None: V is stored
    """

    dtype: str
    head_dim: int
    block_bytes: int
    k: int
    v: int | None
    slots: int = RAW_SLOTS
    tokens: int = RAW_SLOTS
    positions: int | None = None
    side: SlotsFormat | None = None
    latent: int | None = None

    def __post_init__(self) -> None:
        _check_latent(self.latent, self.v, self.head_dim)
        if self.counted and self.slots != self.tokens:
            raise ValueError(
                f"{self.slots} slots for {self.tokens} tokens, without positions"
            )

    @property
    def counted(self) -> bool:
        """Whether slots hold tokens one after another."""
        return self.positions is None and self.side is None

    @property
    def strips(self) -> int:
        """Strips of a page, rounded up to a power of two, so that a tile is whole pages."""
        strips = -(-self.slots // STRIP)
        return 1 << (strips - 1).bit_length()

    @property
    def tile_pages(self) -> int:
        """Pages that a GPU takes in one iteration."""
        is_tall = self.latent is not None or self.head_dim <= NARROW
        strips = TILE_STRIPS if is_tall else TILE_STRIPS // 2
        return max(1, strips // self.strips)


@dataclass(frozen=True)
class AlignedFormat:
    """fp16 in bit planes, so that attention reads no more bits than it needs.

        fp16   s eeeee mm | mmmm | mmmm        high (8) · middle (4) · low (4)

    Two neighbours along the last axis share a byte of middle or low, the first one in the low
    nibble. K lies channel by channel, V token by token; offsets in a block:

    k_high: u8 [D][tokens] · k_middle, k_low: u8 [D][tokens / 2]
    v_high: u8 [tokens][D] · v_middle, v_low: u8 [tokens][D / 2]
    k_top, v_top: u8 [1][D] - the largest exponent field of each channel in this page
    """

    tokens: int
    head_dim: int
    block_bytes: int
    k_high: int
    k_middle: int
    k_low: int
    v_high: int
    v_middle: int
    v_low: int
    k_top: int
    v_top: int


Format = PageFormat | ExactFormat | AlignedFormat


def latent_of(fmt: Format) -> int | None:
    """Channels of K that are V too; None: V is stored."""
    return None if isinstance(fmt, AlignedFormat) else fmt.latent


def value_dim(fmt: Format) -> int:
    """Channels of V, and of what attention gives."""
    return latent_of(fmt) or fmt.head_dim


def _check_latent(latent: int | None, v: object, head_dim: int) -> None:
    if (latent is None) != (v is not None):
        raise ValueError(
            f"a latent of {latent} channels beside V at {v}; expected one of them"
        )
    if latent is not None and not 0 < latent <= head_dim:
        raise ValueError(f"a latent of {latent} channels; K has {head_dim}")
