"""Exact causal attention of a chunk of a prompt on a CPU with matrix units for bfloat16 (AMX)."""

import torch
from torch import Tensor

from disagg.kernels.cpu.library import PATHS, ExactC, backend, call, has_amx

MAX_DIM = 256
GROUP = 32  # tokens, and channels, that the library takes at a time


def is_served(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the library attends to all tokens of k [H, n, D] by q [Hq, c, D]."""
    head_dim = q.shape[2]
    if any(x.dtype != torch.bfloat16 or x.is_cuda for x in (q, k, v)):
        return False
    if not _is_causal_attention(q, k, v):
        return False
    if head_dim % GROUP or head_dim > MAX_DIM or not q.stride(2) == k.stride(2) == 1:
        return False
    return backend() == PATHS[-1] and has_amx()


def _is_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v are of one head dim and of matching numbers of heads and tokens."""
    if k.shape != v.shape or k.shape[2] != q.shape[2]:
        return False
    return q.shape[0] % k.shape[0] == 0 and q.shape[1] <= k.shape[1]


def attend_exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last c of n tokens: q [Hq, c, D], k and v [H, n, D] -> [Hq, c, D].

    q, k, v: as `is_served` takes them
    """
    # this asks Linux for the tiles; using them without that ends the process
    assert has_amx()
    query_heads, count, head_dim = q.shape
    heads, total, _ = k.shape
    columns = v.new_empty(heads, head_dim, -(-total // GROUP) * GROUP + GROUP)
    columns[:, :, :total] = v.transpose(1, 2)
    columns[:, :, total:] = 0
    out = q.new_empty(count, query_heads, head_dim)
    job = ExactC(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=columns.data_ptr(),
        out=out.data_ptr(),
        count=count,
        total=total,
        heads=heads,
        width=query_heads // heads,
        head_dim=head_dim,
        q_head=q.stride(0),
        q_row=q.stride(1),
        k_head=k.stride(0),
        k_row=k.stride(1),
        v_head=columns.stride(0),
        v_row=columns.stride(1),
        out_head=head_dim,
        out_row=out.stride(0),
        scale=scale,
    )
    call("disagg_attend_exact", job)
    return out.transpose(0, 1)
