"""FlexGen: groups of channels of a token share a scale, in K and in V (arXiv:2303.06865)."""

from dataclasses import dataclass
from typing import ClassVar

from disagg.codecs.contract import require
from disagg.codecs.quantized import Planes, SinkCodec, code_planes, half_planes


@dataclass(frozen=True)
class PerToken(SinkCodec):
    """Asymmetric round-to-nearest of each token by itself.

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

    bits: int = 4
    group: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in (2, 4, 8), f"pertoken:bits is {self.bits}; 2, 4 and 8 are known")
        require(self.group > 0, f"pertoken:group is {self.group}; a positive number is wanted")

    def page_planes(self, head_dim: int) -> Planes:
        divides = head_dim % self.group == 0 and head_dim % 16 == 0
        require(divides, f"pertoken:group={self.group} does not divide the head dim {head_dim}")
        shape = (head_dim // self.group, self.page_tokens)
        scales = half_planes(k_scale=shape, k_zero=shape, v_scale=shape, v_zero=shape)
        return [*code_planes(self.bits, self.page_tokens, head_dim), *scales]
