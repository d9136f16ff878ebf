"""FlexGen: groups of channels of a token share a scale, in K and in V (arXiv:2303.06865)."""

from dataclasses import dataclass
from typing import ClassVar

from disagg.codecs.contract import one_of
from disagg.codecs.quantized import Planes, SinkCodec, code_planes, half_planes


@dataclass(frozen=True)
class PerToken(SinkCodec):
    """Asymmetric round-to-nearest of each token by itself.

    Channels of K that are far larger than others leave the others few codes: see docs/codecs.md.

    bits:   2, 4 or 8; half a bit more with scales and zeros of groups of 64
    group:  channels that share a scale; it divides the head dim
    error:  |x' - x| <= s/2 + 2**-11 (|x| + s * 2**bits) + 2**(bits-25) per group, where s is its
            scale fp16(max(range / (2**bits - 1), max|x| / 1024, 2**-24))
    cost:   not measured
    source: FlexGen, arXiv:2303.06865, section 4; scale and minimum instead of the inverse scale,
            which is infinite for a constant group. No residual: a page is sealed as soon as full
    """

    name: ClassVar[str] = "pertoken"
    k_by: ClassVar[str] = "row"

    bits: int = one_of(4, (2, 4, 8))
    group: int = one_of(64, range(1, 1 << 40), "expected a positive number")

    def page_planes(self, head_dim: int) -> Planes:
        shape = (self.parts(head_dim), self.page_tokens)
        codes = code_planes(self.bits, self.page_tokens, head_dim)
        scales = half_planes(k_scale=shape, k_zero=shape, v_scale=shape, v_zero=shape)
        return [*codes, *scales]
