"""Adds outlier channels to the keys of a model without changing its answers, to test codecs.

Some channels of K are multiplied by a factor, and the same channels of q are divided by it, so that
no score changes. In trained models such channels, as in Qwen2 and 2.5, come from the biases of the
key projections.

This happens where attention receives q and k. Scaling rows c and c + D/2 of a key projection, and
of its query heads, would do the same, because RoPE rotates these two together. But each
architecture has its projections, biases and norms in other places.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from disagg.kernels.view import Softmax
from disagg.model.attention import Attention

# the lower channel of each pair, in 16ths of a head; they rotate at different speeds
PAIRS = (1, 4, 7)
EVERY_HEAD = 2  # KV heads 0, 2, 4 ... have outliers


@dataclass(frozen=True)
class KeyOutliers:
    """A change of q and k that keeps their products.

    factor: a power of two, so that nothing is rounded
    """

    factor: float

    def around(self, attend: Attention) -> Attention:
        """Attention that gets K with outlier channels, and q scaled down in them."""

        def attend_changed(
            module: nn.Module,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            softmax: Softmax,
            options: dict,
        ) -> Tensor:
            q, k = self.apply(q, k)
            return attend(module, q, k, v, softmax, options)

        return attend_changed

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [Hq, N, D] and k [H, N, D], changed."""
        heads, _, head_dim = k.shape
        lower = [pair * head_dim // 16 for pair in PAIRS]
        channels = lower + [channel + head_dim // 2 for channel in lower]
        scales = torch.ones(heads, 1, head_dim, dtype=k.dtype, device=k.device)
        scales[::EVERY_HEAD, :, channels] = self.factor
        group = q.shape[0] // heads
        return q / scales.repeat_interleave(group, 0), k * scales
