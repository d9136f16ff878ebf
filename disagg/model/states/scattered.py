"""States of several sequences as one tensor, while each of them stays in its record."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class ScatteredStates(Tensor):
    """States [B, ...] that lie in B places: a batch for a layer that reads and overwrites it.

    Most layers multiply their states once, and overwrite them. A product reads each state where it
    is, and `copy_` writes it there. Any other operation gets a copy of all states, which is made
    once; `write_back` returns it to the places.
    """

    _places: Sequence[Tensor]
    _copy: Tensor | None

    @staticmethod
    def __new__(cls, places: Sequence[Tensor]) -> "ScatteredStates":
        """places: [1, ...] each, all of one shape and dtype"""
        first = places[0]
        shape = (len(places), *first.shape[1:])
        states: ScatteredStates = Tensor._make_wrapper_subclass(
            cls, shape, dtype=first.dtype, device=first.device
        )
        states._places = places
        states._copy = None
        return states

    def write_back(self) -> None:
        """Return the states to their places, if operations had to copy them."""
        if self._copy is not None:
            write_each(self._places, self._copy)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no class
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # torch splits composite operations itself, but not in inference mode
        result = func.decompose(*args, **(kwargs or {}))
        if result is NotImplemented and func is aten.mul.Tensor:
            result = cls._multiply(*args)
        if result is NotImplemented and func is aten.copy_.default:
            result = cls._overwrite(*args)
        if result is not NotImplemented:
            return result
        args, kwargs = tree_map_only(cls, cls._copied, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def _multiply(cls, left: Any, right: Any) -> Any:
        """A product, of states where they are; NotImplemented where these must be copied."""
        states, factor = (left, right) if isinstance(left, cls) else (right, left)
        if states._copy is not None or not states._has_parts(factor):
            return NotImplemented
        product = torch.empty(states.shape, dtype=states.dtype, device=states.device)
        parts = zip(states._places, factor.split(1), product.split(1), strict=True)
        for place, own_factor, own_product in parts:
            torch.mul(place, own_factor, out=own_product)
        return product

    @classmethod
    def _overwrite(cls, states: Any, source: Tensor, *_: Any) -> Any:
        """Overwrite states where they are; NotImplemented where they are copied already."""
        if not isinstance(states, cls) or states._copy is not None:
            return NotImplemented
        if states.shape != source.shape:
            return NotImplemented
        write_each(states._places, source)
        return states

    def _has_parts(self, factor: Any) -> bool:
        """Whether a factor has a part for each state, no larger than it and of its dtype."""
        if not isinstance(factor, Tensor) or isinstance(factor, ScatteredStates):
            return False
        if factor.dtype != self.dtype or factor.ndim != self.ndim:
            return False
        sizes = zip(factor.shape, self.shape, strict=True)
        is_no_larger = all(size in (1, own_size) for size, own_size in sizes)
        return is_no_larger and len(factor) == len(self)

    def _copied(self) -> Tensor:
        if self._copy is None:
            self._copy = torch.cat([*self._places])
        return self._copy


def write_each(places: Sequence[Tensor], states: Tensor) -> None:
    """Copy states [B, ...] to their places [1, ...]."""
    for place, state in zip(places, states.split(1), strict=True):
        place.copy_(state)
