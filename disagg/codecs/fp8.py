"""fp8: the baseline with hardware support, e4m3 with a scale for each page and KV head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from disagg.codecs.quantized import Planes, QuantizedCodec
from disagg.kernels.cpu.library import EXACT_ERRORS


@dataclass(frozen=True)
class Fp8(QuantizedCodec):
    """float8_e4m3fn of x / s, saturated at +-448; s = max|x| / 448 of a page, in fp32.

    8.02 bits a number.

    A scale for each page rather than for the sequence, so that a page depends on nothing but its
    tokens. In a floating format the scale matters for range alone.

    error:  |x' - x| <= 2**-4 |x| + 2**-10 s
    cost:   8.03 bits, -0.1 %, KL 0.0027
    source: the fp8 caches of serving systems
    """

    name: ClassVar[str] = "fp8"
    no_sink: ClassVar[str] = (
        "the error of a float is relative, so large tokens cost the others nothing"
    )
    k_by: ClassVar[str] = "block"
    v_by: ClassVar[str] = "block"
    attend_errors: ClassVar[Mapping[str, float]] = EXACT_ERRORS

    def page_planes(self, head_dim: int) -> Planes:
        return [
            ("k_codes", "float8_e4m3fn", (self.page_tokens, head_dim)),
            ("v_codes", "float8_e4m3fn", (head_dim, self.page_tokens)),
            ("k_scale", "float32", (1, 1)),
            ("v_scale", "float32", (1, 1)),
        ]
