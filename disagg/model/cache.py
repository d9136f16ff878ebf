"""Where transformers thinks the KV is, and where a prompt's exact KV really is while it prefills.

`PassThrough` is the `Cache` that models get: it stores nothing and hands new K and V straight to
our attention. `Workspace` holds exact K and V of one prompt, dense, until its last chunk is done.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
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

LAST_QUERIES = 32


class PassThrough(Cache):
    """A cache that keeps nothing: `update` returns the new K and V untouched."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def pass_through(model: PreTrainedModel) -> dict[str, object]:
    """The arguments that give a model a `PassThrough`, by the name that its transformers has."""
    known = inspect.signature(model.forward).parameters
    return {
        "cache" if "cache" in known else "past_key_values": PassThrough(),
        "use_cache": True,
    }


class Workspace:
    """Exact K and V of one prompt in all layers, after RoPE, as the model computed them.

    And what codecs may ask of its queries: those of its last tokens, and sums of squares.

    rooms: of each layer, the tokens that it holds, the last ones of all; without any: all
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        total: int,
        head_dim: int,
        rooms: Sequence[int] = (),
    ):
        self.total = total
        self._shapes = [
            (2, heads, room, head_dim) for room in rooms or (total,) * layers
        ]
        self._held = [0] * layers
        self._layers: list[Tensor | None] = [None] * layers
        self._last: list[Tensor | None] = [None] * layers
        self._softmax: list[Softmax | None] = [None] * layers
        self._squares: list[Tensor | None] = [
            None
        ] * layers  # of queries, by units of the lead

    def reserve(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take the memory for all layers at once, before chunks come: it is there, or this raises.

        MemoryError, or the RuntimeError of torch, where there is none
        """
        self._layers = [
            torch.empty(x, dtype=dtype, device=device) for x in self._shapes
        ]

    def extend(
        self, layer: int, k: Tensor, v: Tensor, before: int
    ) -> tuple[Tensor, Tensor]:
        """Append k, v [H, c, D] of a chunk behind `before` tokens; K, V [H, n, D] of the last n
        tokens so far: all, or as many as there is room for."""
        held, shape = self._held[layer], self._shapes[layer]
        if k.shape[1] == self.total:  # one chunk: nothing to remember
            return k, v
        k, v = (
            k[:, -shape[2] :],
            v[:, -shape[2] :],
        )  # what was known may be more than there is room
        count = k.shape[1]
        stored = self._layers[layer]
        if stored is None:
            stored = self._layers[layer] = torch.empty(
                shape, dtype=k.dtype, device=k.device
            )
        kept = min(held, shape[2] - count)
        if kept < held:
            stored[:, :, :kept] = stored[:, :, held - kept : held].clone()
        end = self._held[layer] = kept + count
        stored[0, :, kept:end] = k
        stored[1, :, kept:end] = v
        if before + count == self.total:
            self._layers[layer] = None
        return stored[0, :, :end], stored[1, :, :end]

    def observe(
        self, layer: int, q: Tensor, before: int, softmax: Softmax | None = None
    ) -> None:
        """Remember of a chunk's queries q [Hq, c, D] the last tokens' own, and sums of squares."""
        self._softmax[layer] = softmax
        last = q[:, max(0, self.total - LAST_QUERIES - before) :].clone()
        earlier, sums = self._last[layer], self._squares[layer]
        self._last[layer] = last if earlier is None else torch.cat([earlier, last], 1)
        if sums is None or before < LEAD_END:
            squares = squares_by_unit(q, self._shapes[layer][1], before)
            self._squares[layer] = squares if sums is None else sums + squares

    def queries(self, layer: int) -> Queries:
        """What is known of the queries of the chunks so far, which were all observed."""
        last, sums = self._last[layer], self._squares[layer]
        assert last is not None
        assert sums is not None
        return Queries(last, sum_lead(sums, self.total), self._softmax[layer])

    def squares(self, unit: int) -> Tensor | None:
        """Sums of squares of the queries of 16 tokens, on the host: [L, H, D]; None: nobody wants
        them."""
        known = [x[unit] for x in self._squares if x is not None and unit < len(x)]
        return torch.stack(known).cpu() if known else None

    def recall(self, squares: Tensor) -> None:
        """Take the sums of the first units as they were: [units, L, H, D]."""
        for layer, some in enumerate(squares.unbind(1)):
            rest = LEAD_UNITS - len(some)
            self._squares[layer] = torch.cat(
                [some, some.new_zeros(rest, *some.shape[1:])]
            )
