"""Caches of transformers that hold states: of a whole row, and of one part of it in one layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from disagg.kv.page import Plane
from disagg.model.cache import PassThrough
from disagg.model.states.step import StateStep


class StepCache(PassThrough):
    """The cache that a model gets: it brings the parts of the row to the layers.

    positions: [1, N] of the rows
    """

    def __init__(self, step: StateStep, arena: Tensor, positions: Tensor):
        super().__init__()
        self.step = step
        self.arena = arena
        self.tokens = positions.shape[1]
        self._positions = positions[0]

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """The tokens before a row, to which a layer adds indices to get positions: [N].

        Without a layer it is 0: models are given their positions.
        """
        if layer_idx is None:
            return 0
        rows = torch.arange(self.tokens, device=self._positions.device)
        return self._positions - rows


class PartCache(PassThrough):
    """The states of one layer for one part of a row. A layer may also change them in place.

    states:     by the name of their plane; empty before the first token
    new_states: those that the layer has given
    planes:     their sizes, where these are known
    """

    def __init__(
        self, states: Mapping[str, Tensor], planes: Mapping[str, Plane] | None = None
    ):
        super().__init__()
        self.states = states
        self.new_states: dict[str, Tensor] = {}
        self._planes = planes or {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"recurrent{state_idx}")

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """The inputs that a convolution sees, of which the last ones are kept."""
        name = f"conv{state_idx}"
        size = conv_kernel_size or conv_states.shape[-1]
        if name in self._planes:
            size = self._planes[name].shape[-1]
        before = self.states.get(name)
        if before is None:
            missing = max(0, size - conv_states.shape[-1])
            inputs = nn.functional.pad(conv_states, (missing, 0))
        else:
            inputs = torch.cat([before, conv_states], -1)
        self.new_states[name] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.new_states[f"recurrent{state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False
