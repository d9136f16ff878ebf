"""What a kernel knows of the bytes it reads and writes: numbers, no codec and no layout by name.

Offsets are bytes from the start of a block: the part of a page that one layer and one KV head own.
The block of (page, head) lies at `page * 128 + base + head * block_bytes` in the arena.
"""

from dataclasses import dataclass

ARENA_UNIT = 128  # bytes; a page id counts these from the start of the arena
PLANES = 4  # bit-fields of a code word along the axis that attention does not contract


@dataclass(frozen=True)
class RawFormat:
    """Exact K and V, token-major.

    dtype: "float16", "bfloat16" or "float32"
    k, v:  offset of [tokens, head_dim] of dtype
    """

    dtype: str
    head_dim: int
    block_bytes: int
    k: int
    v: int
    tokens: int = 16


@dataclass(frozen=True)
class QuantFormat:
    """Codes with a scale and a zero per group; x = scale * (code + zero).

    K is quantised per channel in groups of k_group tokens, V per token in groups of v_group
    channels. With T = tokens, D = head_dim and h = halves the planes are

        k_codes  int16 [T/4][D/h]        k_scale, k_zero  fp16 [T/k_group][D]
        v_codes  int16 [D/4][T/h]        v_scale, v_zero  fp16 [D/v_group][T]

    so V is laid out as K is, with tokens and channels swapped. The code word: attention contracts
    channels of K and tokens of V; the other axis is cut into four planes, one bit-field each, and
    for 2 bit the contracted axis is cut into two halves, the second one 8 bits up:

        word [r][c]   bit  plane * bits + 8 * half   holds the code of
                      row  plane * rows/4 + r,  column  half * columns/h + c
    """

    bits: int
    tokens: int
    head_dim: int
    k_group: int
    v_group: int
    block_bytes: int
    k_codes: int
    v_codes: int
    k_scale: int
    k_zero: int
    v_scale: int
    v_zero: int

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"codes of {self.bits} bits; 2 and 4 are known")
        for name, size in (("tokens", self.tokens), ("head_dim", self.head_dim)):
            if size % PLANES or size % self.halves:
                raise ValueError(f"{name} is {size}; code words need a multiple of {PLANES}")
        if self.tokens % self.k_group or self.head_dim % self.v_group:
            raise ValueError(
                f"groups of {self.k_group} tokens and {self.v_group} channels do not divide "
                f"{self.tokens} tokens of {self.head_dim} channels"
            )

    @property
    def halves(self) -> int:
        """Parts of the contracted axis that share a 16-bit word."""
        return 16 // (PLANES * self.bits)
