"""States as they are handed off: matrices in 16 or 8 bits, all else as it is.

In 8 bits an element is its code times the scale of its row times that of its column, since kinds of
layers differ in what a read sums up, and where their large channels are: a delta rule sums up
rows, Mamba 2 columns. Measured, both scales together lose as little as the better one alone:

    state [H, R, C] fp32 ─ narrow ─► codes [H, R, C] int8 · rows [H, R, 1] · columns [H, 1, C] bf16
                                                  │ sent, digested, stored
    state [H, R, C] fp32 ◄─ widen ────────────────┘
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from disagg.kv.page import column_scales, row_scales
from disagg.model.states.records import StateRecords

MAX_CODE = 127
LEAST_SCALE = 2.0**-96  # smaller elements become zero
SMALLEST_SHARE = 2.0**-24  # of the largest element: zeros count as this


def narrow(states: StateRecords, page: int, wire: StateRecords, wire_page: int) -> None:
    """Write the wire record of a state, from its record.

    error: half a step of a code, `row * column / 2`; of BF16, 2**-9 of each element
    """
    views = wire.views(wire_page)
    for name, state in states.views(page).items():
        if views[name].dtype == torch.int8:
            _encode(state.float(), name, views)
        else:
            views[name].copy_(state)


def widen(wire: StateRecords, wire_page: int, states: StateRecords, page: int) -> None:
    """Write the record of a state, from its wire record."""
    views = wire.views(wire_page)
    for name, state in states.views(page).items():
        if views[name].dtype == torch.int8:
            codes = views[name].float()
            columns = codes * views[column_scales(name)].float()
            state.copy_(columns * views[row_scales(name)].float())
        else:
            state.copy_(views[name])


def _encode(state: Tensor, name: str, views: Mapping[str, Tensor]) -> None:
    """Codes by the scales as they are stored.

    The scale of a column is the root of its mean square, in rows of equal size; that of a row fits
    its largest element to the codes.
    """
    equal_rows = state / _row_sizes(state)
    columns = views[column_scales(name)]
    mean_squares = equal_rows.square().mean(-2, keepdim=True)
    columns.copy_(mean_squares.sqrt().clamp_min(LEAST_SCALE))
    equal_columns = state / columns.float()
    largest = equal_columns.abs().amax(-1, keepdim=True)
    rows = views[row_scales(name)]
    rows.copy_((largest / MAX_CODE).clamp_min(LEAST_SCALE))
    codes = (equal_columns / rows.float()).round()
    views[name].copy_(codes.clamp(-MAX_CODE, MAX_CODE))


def _row_sizes(state: Tensor) -> Tensor:
    """Geometric means: a column of large elements changes those of all rows alike."""
    sizes = state.abs()
    floor = sizes.amax((-2, -1), keepdim=True) * SMALLEST_SHARE
    sizes = sizes.maximum(floor.clamp_min(LEAST_SCALE))
    return sizes.log().mean(-1, keepdim=True).exp()
