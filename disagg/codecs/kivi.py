"""KIVI: keys quantised per channel, values per token (arXiv:2402.02750)."""

from dataclasses import dataclass
from typing import ClassVar

from disagg.codecs.contract import WHOLE_RAWS, one_of
from disagg.codecs.quantized import Planes, SinkCodec, code_planes, half_planes


@dataclass(frozen=True)
class Kivi(SinkCodec):
    """Asymmetric round-to-nearest; K in groups of tokens per channel, V in groups of channels.

    bits:     2 or 4; with scales and zeros 2.5 and 4.5 a number in groups of 64, 3 and 5 of 32
    group:    16, 32 or 64 - tokens that share a scale of K, and channels that share a scale of V
    residual: R, exact tokens always kept; the tail holds R .. R+63
    error:    |x' - x| <= s/2 + 2**-11 (|x| + s * 2**bits) + 2**(bits-25) per group, where s is its
              scale fp16(max(range / (2**bits - 1), max|x| / 1024, 2**-24))
    cost:     bits=4: 4.50 bits, +0.5 %, KL 0.0071; bits=2: 2.50 bits, +25.3 %, KL 0.2583, and in
              groups of 32: 3.00 bits, +17.4 %, KL 0.1693; residual=64 in all
    source:   KIVI, arXiv:2402.02750, Algorithm 1, with one fill level for K and V: a page is sealed
              when R + 64 exact tokens are there, so both keep at least R
    """

    name: ClassVar[str] = "kivi"

    bits: int = one_of(2, (2, 4))
    group: int = one_of(64, (16, 32, 64))
    residual: int = one_of(128, *WHOLE_RAWS)

    @property
    def tail_tokens(self) -> int:
        return self.residual

    def page_planes(self, head_dim: int) -> Planes:
        tokens = self.page_tokens
        k = (tokens // self.group, head_dim)
        v = (self.parts(head_dim), tokens)
        scales = half_planes(k_scale=k, k_zero=k, v_scale=v, v_zero=v)
        return [*code_planes(self.bits, tokens, head_dim), *scales]
