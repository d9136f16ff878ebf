"""A decode step on a CPU: what all layers of a group have in common is filled in once.

A layer is one call of the C library then, which says where its tensors are: it copies the new
tokens to their raw pages and attends. Knows no codec; pages that are sealed are somebody else's.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.kernels.cpu.attend import fill, readable
from disagg.kernels.cpu.library import (
    TYPES,
    AppendC,
    AttentionC,
    StepC,
    address,
    call,
    format_of,
)
from disagg.kernels.reference.softmax import merge
from disagg.kernels.sealing import NewRows
from disagg.kernels.view import Softmax, View


class LayerCalls:
    """A step of N sequences that append a token each.

    rows, views: those of the group's first layer page; the library serves all of them
    """

    def __init__(self, arena: Tensor, rows: NewRows, views: Sequence[View]) -> None:
        self._rows, heads, dim = rows.pages.shape[0], views[0].heads, rows.fmt.head_dim
        fmt = format_of(rows.fmt)
        self._tables, *self._held = *fill(views), arena, rows, fmt
        places = address(rows.pages), address(rows.slots)
        where = ctypes.addressof(fmt), rows.base
        append = AppendC(
            address(arena), 0, 0, *places, 0, heads, 0, 0, 0, 0, 0, *where, 0
        )
        sizes = (len(views), self._rows, 1, heads, 0, dim, 0, 0, 0, 0)
        attention = AttentionC(ctypes.addressof(self._tables), 0, 0, 0, *sizes)
        self._job = StepC(append, attention)

    def run(
        self,
        rank: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        written: bool,
        softmax: Softmax,
    ) -> Tensor:
        """Append and attend in the layer page of a rank: [N, Hq, D] of q's dtype.

        q: [Hq, N, D] · k, v: [H, N, D]; written: they are there already
        """
        dtype = (
            q.dtype if softmax.sinks is None else torch.float32
        )  # o meets these in fp32
        queries = readable(q, dtype)
        o = q.new_empty(q.shape[1], q.shape[0], q.shape[2], dtype=dtype)
        append, attention = self._job.append, self._job.attention
        append.rows = 0 if written else self._rows
        if not written:
            k, v = readable(k, k.dtype), readable(v, k.dtype)
            append.type = TYPES[k.dtype]
            append.k, append.k_head, append.k_row = (
                k.data_ptr(),
                k.stride(0),
                k.stride(1),
            )
            append.v, append.v_head, append.v_row = (
                v.data_ptr(),
                v.stride(0),
                v.stride(1),
            )
        attention.type = TYPES[dtype]
        attention.q, attention.o = queries.data_ptr(), o.data_ptr()
        attention.q_head, attention.q_row = queries.stride(0), queries.stride(1)
        attention.width = q.shape[0] // k.shape[0]
        attention.scale, attention.cap = softmax.scale, softmax.cap
        lse = None if softmax.sinks is None else o.new_empty(o.shape[:2])
        attention.lse = address(lse)
        append.layer = attention.layer = rank
        call("disagg_step", self._job)
        if lse is not None:
            o = merge([(o, lse)], softmax.sinks)
        return o if o.dtype is q.dtype else o.to(q.dtype)
