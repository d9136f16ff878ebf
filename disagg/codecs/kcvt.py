"""KCVT: keys quantised per channel over a whole segment, values per token (arXiv:2403.05527)."""

from dataclasses import dataclass
from typing import ClassVar

from disagg.codecs.contract import one_of
from disagg.codecs.quantized import Planes, SinkCodec, code_planes, half_planes
from disagg.kv.page import FinalAt, Kind, Layout, make_layout


@dataclass(frozen=True)
class Kcvt(SinkCodec):
    """Asymmetric round-to-nearest; the scales of K live in the segment, those of V in the page.

    K has one group for each channel of a segment of 2,048 tokens, V one for each token and KV head.
    A page sealed while decoding holds both, so all such pages are one run.

    bits:   2, 4 or 8; with scales 2.13, 4.13, 8.13 a number at head dim 128
    error:  |x' - x| <= s/2 + 2**-11 (|x| + s * 2**bits) + 2**(bits-25) per group, where s is its
            scale fp16(max(range / (2**bits - 1), max|x| / 1024, 2**-24))
    cost:   4.26 bits, +1.9 %, KL 0.0207
    source: the backbone KCVT of GEAR, arXiv:2403.05527, section 3; V per token and head instead of
            per token, so that heads can be split; 64 tokens instead of 20 while decoding
    """

    name: ClassVar[str] = "kcvt"
    final_at: ClassVar[FinalAt] = FinalAt.SEGMENT

    bits: int = one_of(4, (2, 4, 8))

    def page_planes(self, head_dim: int) -> Planes:
        shape = (1, self.page_tokens)
        codes = code_planes(self.bits, self.page_tokens, head_dim)
        scales = half_planes(v_scale=shape, v_zero=shape)
        return [*codes, *scales]

    def segment_planes(self, head_dim: int) -> Planes:
        shape = (1, head_dim)
        return half_planes(k_scale=shape, k_zero=shape)

    def flush_page_layout(self, head_dim: int) -> Layout | None:
        planes = self.page_planes(head_dim) + self.segment_planes(head_dim)
        return make_layout(self.spec, Kind.PAGE, self.page_tokens, planes)
