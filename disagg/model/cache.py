"""Where transformers thinks the KV is, and where a prompt's exact KV really is while it prefills.

`PassThrough` is the `Cache` that models get: it stores nothing and hands new K and V straight to
our attention. `Workspace` holds exact K and V of one prompt, dense, until its last chunk is done.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

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

    And the queries of its last tokens, for codecs that choose tokens by attention.
    """

    def __init__(self, layers: int, heads: int, total: int, head_dim: int):
        self.total = total
        self._shape = (2, heads, total, head_dim)
        self._layers: list[Tensor | None] = [None] * layers
        self._queries: list[Tensor | None] = [None] * layers

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
        """Remember those of a chunk's queries q [Hq, c, D] that belong to the last tokens."""
        start = max(0, self.total - LAST_QUERIES - before)
        earlier = self._queries[layer] if before else None
        if start < q.shape[1]:
            parts = [x for x in (earlier, q[:, start:]) if x is not None]
            self._queries[layer] = torch.cat(parts, 1)

    def queries(self, layer: int) -> Tensor | None:
        """The queries of the last tokens, [Hq, W, D] when the prompt is done; None: not yet."""
        return self._queries[layer]
