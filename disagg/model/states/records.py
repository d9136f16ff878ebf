"""The states of sequences in an arena: one side record for each layer and sequence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from disagg.kv.page import ARENA_UNIT, Layout, Plane, units_for
from disagg.model.states.scattered import ScatteredStates, write_each

WORDS = ARENA_UNIT // 8  # int64 words: states are gathered in units of the arena
LARGE_BYTES = (
    64 << 10
)  # of a plane: on a CPU one operation each is faster than unit by unit


@dataclass(frozen=True)
class StateRecords:
    """The records of one layer in an arena."""

    arena: Tensor
    layout: Layout

    @cached_property
    def planes(self) -> dict[str, Plane]:
        return {plane.name: plane for plane in self.layout.planes}

    def views(self, page: int) -> dict[str, Tensor]:
        """The states of one sequence where they are: [1, ...]."""
        return {name: self._view(page, plane) for name, plane in self.planes.items()}

    def gather(self, pages: Tensor) -> dict[str, Tensor]:
        """The states of several sequences, to be changed until `scatter`: [B, ...].

        On a CPU large ones stay in their records; others are copied.
        """
        states: dict[str, Tensor] = {}
        for name, plane in self.planes.items():
            if self._is_large(plane):
                views = [self._view(page, plane) for page in pages.tolist()]
                states[name] = ScatteredStates(views)
            else:
                states[name] = self._gather_units(pages, plane)
        return states

    def scatter(self, pages: Tensor, states: Mapping[str, Tensor]) -> None:
        """Copy the states of several sequences to their records, if they are not there already."""
        for name, state in states.items():
            plane = self.planes[name]
            if isinstance(state, ScatteredStates):
                state.write_back()
            elif self._is_large(plane):
                views = [self._view(page, plane) for page in pages.tolist()]
                write_each(views, state)
            else:
                self._scatter_units(pages, plane, state)

    def _is_large(self, plane: Plane) -> bool:
        return self.arena.is_cpu and plane.nbytes >= LARGE_BYTES

    def _view(self, page: int, plane: Plane) -> Tensor:
        span = plane.span(page)
        states = self.arena[span].view(_dtype_of(plane))
        return states.view(1, *plane.shape)

    def _gather_units(self, pages: Tensor, plane: Plane) -> Tensor:
        places = self._places(pages, plane)
        words = self._units.index_select(0, places.flatten())
        items = words.view(_dtype_of(plane))
        items = items.view(len(pages), -1)
        num_items = math.prod(plane.shape)
        own_items = items[:, :num_items]
        return own_items.reshape(len(pages), *plane.shape)

    def _scatter_units(self, pages: Tensor, plane: Plane, state: Tensor) -> None:
        places = self._places(pages, plane)
        items = state.to(_dtype_of(plane))
        items = items.reshape(len(pages), -1)
        room = places.shape[1] * ARENA_UNIT // items.element_size()
        padding = room - items.shape[1]
        if padding:  # else it would be a copy
            items = nn.functional.pad(items, (0, padding))
        words = items.contiguous().view(torch.int64)
        words = words.view(-1, WORDS)
        self._units.index_copy_(0, places.flatten(), words)

    @cached_property
    def _units(self) -> Tensor:
        return self.arena.view(torch.int64).view(-1, WORDS)

    def _places(self, pages: Tensor, plane: Plane) -> Tensor:
        """The units of a plane: [B, units] int64."""
        own = plane.units()
        units = torch.arange(own.start, own.stop, device=pages.device)
        return pages.long()[:, None] + units


def _dtype_of(plane: Plane) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, plane.dtype)
    return dtype


def scratch_bytes(layouts: Sequence[Layout]) -> int:
    """Bytes of a record that can stand for one of any layer."""
    return max((layout.block_bytes for layout in layouts), default=0)


def record_pages(layouts: Sequence[Layout], first: int = 0) -> list[int]:
    """Pages of one record for each layer, side by side, and the page behind them."""
    units = [units_for(layout.block_bytes) for layout in layouts]
    return list(accumulate(units, initial=first))


def arena_until(end: int, fill: int, device: torch.device | None = None) -> Tensor:
    """An arena that ends at a page, with at least one unit; every byte is `fill`."""
    nbytes = max(1, end) * ARENA_UNIT
    return torch.full((nbytes,), fill, dtype=torch.uint8, device=device)
