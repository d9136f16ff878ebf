"""Exact K and V in slots, as one attention kernel reads them wherever they are.

raw     pages of the raw codec and tails          slot s of page p: token 16 p + s
kept    raw pages of tokens beside their codes    a side record says which token a slot holds
dropped pages of the tokens that stayed           the page says which token a slot holds
"""

from dataclasses import dataclass
from functools import lru_cache

from disagg.kernels.formats import RawFormat
from disagg.kernels.reference_dropped import DroppedFormat
from disagg.kernels.reference_kept import KeptFormat

STRIP = 16  # slots that are read together: the rows of a matrix product
TILE_STRIPS = 4  # strips that a kernel takes in one iteration


@dataclass(frozen=True)
class ExactFormat:
    """K and V [slots][head_dim] of dtype in a block, which stands for `tokens` tokens.

    dtype:     "float16", "bfloat16" or "float32"
    k, v:      offsets in the block
    positions: offset in the block of the tokens' positions, int32 [slots]
    side:      the side record that has the positions of all slots of a table, in order, and states
    """

    dtype: str
    head_dim: int
    block_bytes: int
    k: int
    v: int
    slots: int
    tokens: int
    positions: int | None = None
    side: KeptFormat | None = None

    def __post_init__(self) -> None:
        if self.slots > TILE_STRIPS * STRIP:
            raise ValueError(
                f"pages of {self.slots} slots; at most {TILE_STRIPS * STRIP} are known"
            )
        if self.counted and self.slots != self.strips * STRIP:
            raise ValueError(f"{self.slots} slots without positions; whole strips are wanted")

    @property
    def counted(self) -> bool:
        """Whether slot s of page column p simply holds token p * tokens + s."""
        return self.positions is None and self.side is None

    @property
    def strips(self) -> int:
        """Of a page, rounded up to a power of two, so that a tile is whole pages."""
        return 1 << (-(-self.slots // STRIP) - 1).bit_length()

    @property
    def tile_pages(self) -> int:
        """Pages of one iteration."""
        return TILE_STRIPS // self.strips


@lru_cache
def as_exact(fmt: RawFormat, side: KeptFormat | None = None) -> ExactFormat:
    """Raw pages; with a side record, those of the tokens that it names."""
    return ExactFormat(
        dtype=fmt.dtype,
        head_dim=fmt.head_dim,
        block_bytes=fmt.block_bytes,
        k=fmt.k,
        v=fmt.v,
        slots=fmt.tokens,
        tokens=fmt.tokens,
        side=side,
    )


@lru_cache
def dropped_as_exact(fmt: DroppedFormat) -> ExactFormat:
    """Pages of tokens that stayed."""
    return ExactFormat(
        dtype="float16",
        head_dim=fmt.head_dim,
        block_bytes=fmt.block_bytes,
        k=fmt.k,
        v=fmt.v,
        slots=fmt.slots,
        tokens=fmt.tokens,
        positions=fmt.positions,
    )
