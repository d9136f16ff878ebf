"""What a layer computes between its matrix products, on a CPU: one call of the C library each.

kernels/rows.py is the spec, and checks what the library takes.
"""

from torch import Tensor

from disagg.kernels.cpu.library import (
    TORCH,
    TYPES,
    GateC,
    NormC,
    RotationC,
    address,
    backend,
    call,
)


def is_served(x: Tensor, columns: int) -> bool:
    """Whether the library computes rows of so many columns, which lie side by side in x."""
    if x.is_cuda or x.dtype not in TYPES or columns % 16:
        return False
    return x.stride(-1) == 1 and backend() != TORCH


def norm(
    x: Tensor, more: Tensor | None, weight: Tensor, epsilon: float, factor: float
) -> tuple[Tensor, Tensor]:
    """x + factor * more, and its norm: [N, columns] each."""
    rows, columns = x.shape
    out = x.new_empty(rows, columns)
    total = x if more is None else x.new_empty(rows, columns)
    job = NormC(
        x=x.data_ptr(),
        more=address(more),
        weight=weight.data_ptr(),
        sum=None if more is None else total.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        columns=columns,
        x_row=x.stride(0),
        more_row=0 if more is None else more.stride(0),
        type=TYPES[x.dtype],
        epsilon=epsilon,
        factor=factor,
    )
    call("disagg_norm", job)
    return total, out


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotate heads [N, H, D] in place."""
    rows, heads, head_dim = x.shape
    job = RotationC(
        x=x.data_ptr(),
        cosines=cosines.data_ptr(),
        sines=sines.data_ptr(),
        rows=rows,
        heads=heads,
        head_dim=head_dim,
        x_row=x.stride(0),
        type=TYPES[x.dtype],
    )
    call("disagg_rotate", job)


def gate(x: Tensor) -> Tensor:
    """silu of the first half of the columns, times the second half: [N, columns]."""
    rows, both = x.shape
    out = x.new_empty(rows, both // 2)
    job = GateC(
        x=x.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        columns=both // 2,
        x_row=x.stride(0),
        type=TYPES[x.dtype],
    )
    call("disagg_gate", job)
    return out
