"""Where transformers thinks the KV is, and where a prompt's exact KV really is while it prefills.

`PassThrough` is the `Cache` that models get: it stores nothing and hands new K and V straight to
our attention. `Workspace` holds exact K and V of one prompt, dense, until its last chunk is done.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from disagg.codecs.contract import Queries, sum_squares

LAST_QUERIES = 32


class PassThrough(Cache):
    """A cache that keeps nothing: `update` returns the new K and V untouched."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class Workspace:
    """Exact K and V of one prompt in all layers, after RoPE, as the model computed them.

    And what codecs may ask of its queries: those of its last tokens, and sums of squares.
    """

    def __init__(self, layers: int, heads: int, total: int, head_dim: int):
        self.total = total
        self._shape = (2, heads, total, head_dim)
        self._layers: list[Tensor | None] = [None] * layers
        self._queries: list[Queries | None] = [None] * layers

    @property
    def stored_bytes(self) -> int:
        """Bytes held now."""
        return sum(x.nbytes for x in self._layers if x is not None)

    def reserve(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory for all layers at once, before chunks come: it is there, or this raises.

        MemoryError, or the RuntimeError of torch, where there is none
        """
        made = [torch.empty(self._shape, dtype=dtype, device=device) for _ in self._layers]
        self._layers = list(made)

    def extend(self, layer: int, k: Tensor, v: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Append k, v [H, c, D] of a chunk behind `before` tokens; K, V [H, done, D] so far."""
        done = before + k.shape[1]
        if k.shape[1] == self.total:  # one chunk: nothing to remember
            return k, v
        stored = self._layers[layer]
        if stored is None:
            stored = self._layers[layer] = torch.empty(self._shape, dtype=k.dtype, device=k.device)
        stored[0, :, before:done] = k
        stored[1, :, before:done] = v
        if done == self.total:
            self._layers[layer] = None
        return stored[0, :, :done], stored[1, :, :done]

    def observe(self, layer: int, q: Tensor, before: int) -> None:
        """Remember of a chunk's queries q [Hq, c, D] the last tokens' own, and sums of squares."""
        last = q[:, max(0, self.total - LAST_QUERIES - before) :].clone()
        seen = Queries(last, sum_squares(q, before, self.total))
        earlier = self._queries[layer] if before else None
        if earlier is not None:
            seen = Queries(torch.cat([earlier.last, last], 1), earlier.squares + seen.squares)
        self._queries[layer] = seen

    def queries(self, layer: int) -> Queries | None:
        """What is known of the queries so far; None: nobody looked."""
        return self._queries[layer]
