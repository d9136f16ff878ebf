"""The cache that transformers sees, and the real place of a prompt's exact KV while it prefills.

`PassThrough` is the `Cache` that models get: it stores nothing and hands new K and V straight to
our attention. `Workspace` holds exact K and V of one prompt, dense, until its last chunk is done.
"""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from disagg.codecs.contract import (
    LEAD_END,
    LEAD_UNITS,
    Queries,
    squares_by_unit,
    sum_lead,
)
from disagg.kernels.view import Softmax
from disagg.kv.plan import LayerShape

LAST_QUERIES = 32


class PassThrough(Cache):
    """A cache that stores nothing: `update` returns the new K and V unchanged."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def cache_name(model: PreTrainedModel) -> str:
    """The argument that gives a model a cache, in its version of transformers."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


class Workspace:
    """Exact K and V of one prompt in all layers, after RoPE, as the model computed them.

    It also has what codecs ask of the queries: the queries of the last tokens, and sums of squares.

    layers: their shapes
    rooms:  per layer, how many tokens it holds, the last ones of all; empty: each layer holds all
    """

    def __init__(
        self, layers: Sequence[LayerShape], total: int, rooms: Sequence[int] = ()
    ):
        num_layers = len(layers)
        rooms = rooms or [total] * num_layers
        self.total = total
        self._heads = [layer.heads for layer in layers]
        self._latents = [layer.latent for layer in layers]
        self._shapes = [
            (2 if layer.latent is None else 1, layer.heads, room, layer.head_dim)
            for layer, room in zip(layers, rooms, strict=True)
        ]
        self._num_stored = [0] * num_layers
        self._layers: list[Tensor | None] = [None] * num_layers
        self._last_queries: list[Tensor | None] = [None] * num_layers
        self._softmax: list[Softmax | None] = [None] * num_layers
        self._largest: list[Tensor | None] = [None] * num_layers
        # sums of squares of queries, by units of the leading tokens
        self._squares: list[Tensor | None] = [None] * num_layers

    def reserve(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate all layers at once, before the first chunk, so that no later chunk fails.

        MemoryError, or the RuntimeError of torch, where there is no memory
        """
        self._layers = [
            torch.empty(shape, dtype=dtype, device=device) for shape in self._shapes
        ]

    def extend(
        self, layer: int, k: Tensor, v: Tensor, before: int
    ) -> tuple[Tensor, Tensor]:
        """Append k, v [H, c, D] of a chunk behind `before` tokens.

        Returns K, V [H, n, D] of the last n tokens so far: all, or as many as there is room for.
        Of latents, V is a part of K and not stored: [H, n, latent].
        """
        self._note_largest(layer, k, v)
        if k.shape[1] == self.total:  # one chunk: nothing to store
            return k, v
        shape = self._shapes[layer]
        room = shape[2]
        # a cached prefix may be longer than the room
        k = k[:, -room:]
        v = v[:, -room:]
        count = k.shape[1]
        stored = self._layers[layer]
        if stored is None:
            stored = torch.empty(shape, dtype=k.dtype, device=k.device)
            self._layers[layer] = stored
        num_stored = self._num_stored[layer]
        start = min(num_stored, room - count)
        if start < num_stored:  # the oldest tokens leave
            stored[:, :, :start] = stored[:, :, num_stored - start : num_stored].clone()
        end = start + count
        self._num_stored[layer] = end
        latent = self._latents[layer]
        stored[0, :, start:end] = k
        if latent is None:
            stored[1, :, start:end] = v
        if before + count == self.total:
            self._layers[layer] = None
        stored_k = stored[0, :, :end]
        stored_v = stored[1, :, :end] if latent is None else stored_k[..., :latent]
        return stored_k, stored_v

    def _note_largest(self, layer: int, k: Tensor, v: Tensor) -> None:
        # a norm of bfloat16 takes ten times as long
        ends = [end for x in (k, v) for end in torch.aminmax(x)]
        sizes = torch.stack(ends).abs().amax()
        earlier = self._largest[layer]
        if earlier is not None:
            sizes = torch.maximum(earlier, sizes)
        self._largest[layer] = sizes

    def largest(self) -> list[float]:
        """The largest |K| or |V| of each layer, after the last chunk. Waits for the device."""
        sizes = [size for size in self._largest if size is not None]
        numbers: list[float] = torch.stack(sizes).float().tolist()
        return numbers

    def update_largest(self, update: Callable[[Tensor], Tensor]) -> None:
        """Replace the largest |K| or |V| of the layers: [L], those that attended, in order."""
        layers = [i for i, size in enumerate(self._largest) if size is not None]
        sizes = [size for size in self._largest if size is not None]
        for layer, size in zip(layers, update(torch.stack(sizes)), strict=True):
            self._largest[layer] = size

    def observe(
        self, layer: int, q: Tensor, before: int, softmax: Softmax | None = None
    ) -> None:
        """Note queries q [Hq, c, D] of a chunk: those of the last tokens, and sums of squares."""
        self._softmax[layer] = softmax
        first = max(0, self.total - LAST_QUERIES - before)
        last = q[:, first:].clone()
        earlier = self._last_queries[layer]
        if earlier is not None:
            last = torch.cat([earlier, last], 1)
        self._last_queries[layer] = last
        sums = self._squares[layer]
        if sums is None or before < LEAD_END:
            squares = squares_by_unit(q, self._heads[layer], before)
            self._squares[layer] = squares if sums is None else sums + squares

    def queries(self, layer: int) -> Queries:
        """The queries of the chunks so far, which were all observed."""
        last, sums = self._last_queries[layer], self._squares[layer]
        assert last is not None
        assert sums is not None
        return Queries(last, sum_lead(sums, self.total), self._softmax[layer])

    def squares(self, unit: int) -> Tensor | None:
        """Sums of squares of the queries of 16 tokens, on the host; None: not needed.

        [H x D], layer by layer
        """
        layers = [
            x[unit].flatten() for x in self._squares if x is not None and unit < len(x)
        ]
        return torch.cat(layers).cpu() if layers else None

    def recall(self, squares: Tensor) -> None:
        """Set the sums of the first units, each as `squares` returned it: [units, ...]."""
        sizes = [(heads, head_dim) for _, heads, _, head_dim in self._shapes]
        layers = squares.split([heads * head_dim for heads, head_dim in sizes], dim=1)
        missing = (0, 0, 0, LEAD_UNITS - len(squares))
        for layer, (units, size) in enumerate(zip(layers, sizes, strict=True)):
            self._squares[layer] = pad(units, missing).unflatten(1, size)
