"""A codec: the contract of one layer, and `compress`, which needs no service around it."""

from dataclasses import dataclass

from torch import Tensor

from disagg.codecs.cache import CompressedKV
from disagg.codecs.contract import LayerCodec, Queries


@dataclass(frozen=True)
class Codec(LayerCodec):
    """What `get_codec` gives: a subclass is one method, its fields are the options of that."""

    def compress(
        self, k: Tensor, v: Tensor, layer: int = 0, q: Tensor | Queries | None = None
    ) -> CompressedKV:
        """Compress one layer of one sequence: the codec alone, without a service.

        k, v:  [H, n, D], any float dtype - keys after RoPE
        layer: of the model; it matters to codecs that treat the first layers differently
        q:     [Hq, W, D] - the last queries, for codecs that choose by them; or all that is known
        """
        return CompressedKV.from_prompt(self, k, v, layer, q)
