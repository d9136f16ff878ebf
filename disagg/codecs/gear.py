"""GEAR: a quantised backbone, a low-rank fit of its error, and outliers (arXiv:2403.05527)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from disagg.codecs.contract import one_of, require
from disagg.codecs.quantized import Planes, SinkCodec, code_planes, half_planes
from disagg.kv.page import FinalAt, Kind, Layout, make_layout

KIVI_TAIL = 64  # exact tokens that the paper keeps with the KIVI backbone
RANKS = range(1, 17), "expected 1 to 16"


@dataclass(frozen=True)
class GearL(SinkCodec):
    """GEAR-L: the backbone plus A B^T, fitted to its residual for each segment and KV head.

    A lies in the pages, B in the segment. A page sealed while decoding holds both, with a smaller
    rank, so all such pages are one run.

    bits:        2, 4 or 8; by default 3.03, 5.03, 9.03 a number at head dim 128, half a bit more
                 at 64
    backbone:    "kivi" or "kcvt"; both as the codecs of that name
    group:       of the kivi backbone; kcvt has no groups
    rank:        of a prompt's segments; decode_rank: of a page sealed while decoding
    error:       over a segment and head, |X' - X| <= (1 + 2**-9) |D - X| in the Frobenius norm,
                 where D is X under the backbone alone: A B^T is a projection of X - D
    cost:        bits=2: 3.53 bits, +19.0 %, KL 0.1797; bits=4 on kcvt: 5.29 bits, +1.5 %, KL 0.0168
    source:      GEAR, arXiv:2403.05527, Algorithms 1 and 2; three rounds of power iteration. The
                 paper's 4 bits are on KCVT: `backbone=kcvt`; the default here is KIVI
    """

    name: ClassVar[str] = "gear-l"
    final_at: ClassVar[FinalAt] = FinalAt.SEGMENT

    bits: int = one_of(4, (2, 4, 8))
    backbone: str = one_of("kivi", ("kcvt", "kivi"))
    group: int = one_of(64, (16, 32, 64))
    rank: int = one_of(4, *RANKS)
    decode_rank: int = one_of(2, *RANKS)

    @property
    def tail_tokens(self) -> int:
        return KIVI_TAIL if self.backbone == "kivi" else 0

    def flush_page_layout(self, head_dim: int) -> Layout | None:
        small = replace(self, rank=self.decode_rank)
        planes = small.page_planes(head_dim) + small.segment_planes(head_dim)
        return make_layout(self.spec, Kind.PAGE, self.page_tokens, planes)

    def outlier_planes(self, head_dim: int) -> Planes:
        """The sparse slots of a page; GEAR-L has none."""
        return []

    def page_planes(self, head_dim: int) -> Planes:
        scales = self._scales(head_dim)
        if self.backbone == "kcvt":
            scales = [plane for plane in scales if plane[0].startswith("v_")]
        factor = (self.page_tokens, self.rank)
        return [
            *code_planes(self.bits, self.page_tokens, head_dim),
            *scales,
            *half_planes(k_low=factor, v_low=factor),
            *self.outlier_planes(head_dim),
        ]

    def segment_planes(self, head_dim: int) -> Planes:
        scales = []
        if self.backbone == "kcvt":
            scales = [p for p in self._scales(head_dim) if p[0].startswith("k_")]
        factor = (head_dim, self.rank)
        return [*scales, *half_planes(k_basis=factor, v_basis=factor)]

    def _scales(self, head_dim: int) -> Planes:
        """Scales and zeros of the backbone, wherever they are stored."""
        k, v = (1, head_dim), (1, self.page_tokens)
        if self.backbone == "kivi":
            k = (self.page_tokens // self.group, head_dim)
            v = (self.parts(head_dim), self.page_tokens)
        return half_planes(k_scale=k, k_zero=k, v_scale=v, v_zero=v)


@dataclass(frozen=True)
class Gear(GearL):
    """GEAR: GEAR-L whose outliers are set aside before quantising.

    At 2, 4 and 8 bits 3.41, 5.41 and 9.41 a number at head dim 128; 4.09 at 2 bits and 64.

    sparsity: of the numbers of a page that are kept as deltas to their dequantised value, in 64ths:
              K those farthest from the mean of their channel, over what shares its scale; V the
              largest and the smallest of a token, at least one a side
    error:    as GEAR-L, with X - D set to 0 where an outlier is kept
    cost:     bits=2: 4.09 bits, +17.7 %, KL 0.1513
    source:   GEAR, arXiv:2403.05527, Algorithm 1; as many outliers of each page and head. The paper
              takes 2 % of the numbers, those of K at both ends of a channel: here 1.6 %, of either
              end. Its 4 bits are on KCVT: `backbone=kcvt`; the default here is KIVI
    """

    name: ClassVar[str] = "gear"

    sparsity: float = one_of(
        1 / 64,
        [slots / 64 for slots in range(1, 17)],
        "expected a multiple of 1/64, which is 0.015625, up to 0.25",
    )

    def outlier_planes(self, head_dim: int) -> Planes:
        require(
            head_dim <= 256, f"gear counts 256 channels; the head dim is {head_dim}"
        )
        in_k = int(self.page_tokens * self.sparsity)
        in_v = 2 * max(1, round(head_dim * self.sparsity / 2))
        return [
            ("k_index", "uint8", (head_dim, in_k)),
            ("k_delta", "float16", (head_dim, in_k)),
            ("v_index", "uint8", (self.page_tokens, in_v)),
            ("v_delta", "float16", (self.page_tokens, in_v)),
        ]
