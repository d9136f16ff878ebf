"""int8: the plain baseline that every serving system has, symmetric per token and KV head."""

from dataclasses import dataclass
from typing import ClassVar

from disagg.codecs.quantized import Planes, SinkCodec, code_planes, half_planes


@dataclass(frozen=True)
class Int8(SinkCodec):
    """Symmetric round-to-nearest to -127 .. 127, one scale for each token and KV head.

    8.12 bits a number at head dim 128. Channels of K that are far larger than others, as in Qwen2
    and 2.5, leave the others few codes: see docs/codecs.md.

    error:  |x' - x| <= s/2 + 2**-11 max|x| + 2**-17, where s = fp16(max|x| / 127) of the token
    cost:   8.25 bits, +0.1 %, KL 0.0001
    source: the int8 caches of serving systems; codecs of the papers are measured against it
    """

    name: ClassVar[str] = "int8"
    k_by: ClassVar[str] = "row"

    def page_planes(self, head_dim: int) -> Planes:
        shape = (1, self.page_tokens)
        scales = half_planes(k_scale=shape, v_scale=shape)
        return [*code_planes(8, self.page_tokens, head_dim), *scales]
