"""A decode step on a CPU: the arguments that all layers of a group share are filled in once.

Each layer is then one call of the C library: it copies the new tokens to their raw pages and
attends. Knows no codec, and seals no pages.
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

    rows, views: those of the group's first layer page; the library supports all of them
    """

    def __init__(self, arena: Tensor, rows: NewRows, views: Sequence[View]) -> None:
        self._num_rows = rows.pages.shape[0]
        heads = views[0].heads
        fmt = format_of(rows.fmt)
        self._tables, owners = fill(views)
        self._owners = (
            owners,
            arena,
            rows,
            fmt,
        )  # of the memory that the job points to
        append = AppendC(
            arena=address(arena),
            pages=address(rows.pages),
            slots=address(rows.slots),
            heads=heads,
            format=ctypes.addressof(fmt),
            base=rows.base,
        )
        attention = AttentionC(
            tables=ctypes.addressof(self._tables),
            num_tables=len(views),
            batch=self._num_rows,
            m=1,
            heads=heads,
            head_dim=rows.fmt.head_dim,
        )
        self._job = StepC(append=append, attention=attention)

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

        q:       [Hq, N, D]
        k, v:    [H, N, D]; of latents, v is their channels of k, and what comes [N, Hq, latent]
        written: the raw pages hold k and v already
        """
        # o is merged with the sinks in fp32
        dtype = q.dtype if softmax.sinks is None else torch.float32
        queries = readable(q, dtype)
        o = q.new_empty(q.shape[1], q.shape[0], v.shape[2], dtype=dtype)
        lse = None if softmax.sinks is None else o.new_empty(o.shape[:2])
        append = self._job.append
        attention = self._job.attention
        append.layer = rank
        append.rows = 0
        if not written:
            k = readable(k, k.dtype)
            v = readable(v, k.dtype)
            append.rows = self._num_rows
            append.type = TYPES[k.dtype]
            append.k = k.data_ptr()
            append.k_head = k.stride(0)
            append.k_row = k.stride(1)
            append.v = v.data_ptr()
            append.v_head = v.stride(0)
            append.v_row = v.stride(1)
        attention.layer = rank
        attention.type = TYPES[dtype]
        attention.q = queries.data_ptr()
        attention.q_head = queries.stride(0)
        attention.q_row = queries.stride(1)
        attention.o = o.data_ptr()
        attention.lse = address(lse)
        attention.width = q.shape[0] // k.shape[0]
        attention.scale = softmax.scale
        attention.cap = softmax.cap
        call("disagg_step", self._job)
        if lse is not None:
            o = merge([(o, lse)], softmax.sinks)
        return o if o.dtype is q.dtype else o.to(q.dtype)
