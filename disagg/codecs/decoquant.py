"""DecoQuant: channels mixed so that large ones shrink, then quantised (arXiv:2405.12591)."""

from dataclasses import dataclass
from typing import ClassVar

from disagg.codecs.contract import one_of
from disagg.codecs.quantized import Planes, QuantizedCodec, code_planes, half_planes
from disagg.kv.page import FinalAt


@dataclass(frozen=True)
class DecoQuant(QuantizedCodec):
    """K = T_L T_S for every block of channels; T_L symmetric in `bits`, T_S in 16 bits.

    T_S comes from the singular value decomposition of a segment of 2,048 tokens, separately for
    each KV head, K and V. Tokens decoded later use that of the first segment. Attention multiplies
    the query and the output by T_S instead of building K and V.

    bits:   2 (that is -1, 0, 1), 4 or 8; 4.14 a number at 4 and head dim 128
    block:  channels that T_S mixes; it divides the head dim
    error:  |x' - x| <= (s/2 + 2**-11 max|t| + 2**-17) * sum_r |T_S[r, c]| for a channel c of its
            block, where t is the token in T_L and s = fp16(max|t| / (2**(bits-1) - 1))
    cost:   not measured
    source: DecoQuant, arXiv:2405.12591, with n = 2 local tensors, as its in-context-learning code
            has it (a longer chain is the same with a larger block); T_S and scales per KV head.
            Singular values below 1 % of the largest count as 1 %; T_L fits whatever T_S is
    """

    name: ClassVar[str] = "decoquant"
    no_sink: ClassVar[str] = (
        "its rotation is fitted to segments from the first token on"
    )
    final_at: ClassVar[FinalAt] = FinalAt.SEGMENT
    k_by: ClassVar[str] = "row"

    bits: int = one_of(4, (2, 4, 8))
    block: int = one_of(16, range(2, 1 << 40), "expected 2 channels or more")

    def page_planes(self, head_dim: int) -> Planes:
        self.parts(head_dim, "block")  # refuses blocks that do not divide it
        shape = (1, self.page_tokens)
        scales = half_planes(k_scale=shape, v_scale=shape)
        return [*code_planes(self.bits, self.page_tokens, head_dim), *scales]

    def segment_planes(self, head_dim: int) -> Planes:
        shape = (self.block, self.block)
        return half_planes(k_rotation=shape, v_rotation=shape)
