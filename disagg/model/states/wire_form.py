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
# of the largest element, and of the largest column: smaller ones count as this
SMALLEST_SHARE = 2.0**-24


def narrow(states: StateRecords, page: int, wire: StateRecords, wire_page: int) -> None:
    """Write the wire record of a state, from its record.

    error: half a step of a code, `row * column / 2`; of BF16, 2**-9 of each element
    """
    planes = wire.views(wire_page)
    for name, state in states.views(page).items():
        if planes[name].dtype == torch.int8:
            _encode(state.float(), name, planes)
        else:
            planes[name].copy_(state)


def widen(wire: StateRecords, wire_page: int, states: StateRecords, page: int) -> None:
    """Write the record of a state, from its wire record."""
    planes = wire.views(wire_page)
    for name, state in states.views(page).items():
        plane = planes[name]
        if plane.dtype == torch.int8:
            rows = planes[row_scales(name)]
            columns = planes[column_scales(name)]
            plane = plane.float() * columns.float() * rows.float()
        state.copy_(plane)


def _encode(state: Tensor, name: str, planes: Mapping[str, Tensor]) -> None:
    """Codes by the scales as they are stored.

    The scale of a column is the root of its mean square, in rows of equal size; that of a row fits
    its largest element to the codes. Columns of next to nothing share the least scale: in one of
    its own their squares would vanish, and then no row would fit.
    """
    equal_rows = state / _row_sizes(state)
    squares = equal_rows.square()
    column_sizes = squares.mean(-2, keepdim=True).sqrt()
    least_size = column_sizes.amax(-1, keepdim=True) * SMALLEST_SHARE
    column_sizes = column_sizes.maximum(least_size)
    columns = planes[column_scales(name)]
    columns.copy_(column_sizes.clamp_min(LEAST_SCALE))
    equal_columns = state / columns.float()
    largest = equal_columns.abs().amax(-1, keepdim=True)
    row_sizes = largest / MAX_CODE
    rows = planes[row_scales(name)]
    rows.copy_(row_sizes.clamp_min(LEAST_SCALE))
    codes = equal_columns / rows.float()
    codes = codes.round().clamp(-MAX_CODE, MAX_CODE)
    planes[name].copy_(codes)


def _row_sizes(state: Tensor) -> Tensor:
    """Geometric means: a column of large elements changes those of all rows alike."""
    sizes = state.abs()
    largest = sizes.amax((-2, -1), keepdim=True)
    floor = largest * SMALLEST_SHARE
    floor = floor.clamp_min(LEAST_SCALE)
    logs = sizes.maximum(floor).log()
    return logs.mean(-1, keepdim=True).exp()
