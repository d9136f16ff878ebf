"""Realistic K and V without a model, and exact attention to compare with.

On plain Gaussian tensors the premises of the papers vanish: never rank codecs on them.
"""

import torch
from torch import Tensor

from disagg.codecs.contract import Codec
from disagg.paged.compressed_kv import CompressedKV, compress


def gaussian(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers, fp32: queries, mostly."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def realistic(
    heads: int,
    n: int,
    head_dim: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """k, v [H, n, D]: a few large K channels, sink tokens, low-rank structure plus noise."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    k = normal(heads, n, 8) @ normal(heads, 8, head_dim) * 0.4
    k = k + 0.5 * normal(heads, n, head_dim)
    k += normal(heads, 1, head_dim)
    for head in range(heads):
        loud = torch.randperm(head_dim, generator=generator)[:3]
        k[head][:, loud] = 9 * (1 + 0.08 * normal(n, 3))
    v = 0.5 * normal(heads, n, head_dim)
    v = v * torch.exp(0.35 * normal(heads, n, 1))
    if n:
        k[:, 0] *= 0.06
        v[:, 0] *= 0.05
    return k.to(dtype), v.to(dtype)


def prompt_and_decode(
    codec: Codec | str,
    k: Tensor,
    v: Tensor,
    prompt: int,
    layer: int = 0,
    q: Tensor | None = None,
) -> CompressedKV:
    """The first `prompt` tokens compressed as a prompt, the others appended."""
    cache = compress(codec, k[:, :prompt], v[:, :prompt], layer, q)
    cache.append(k[:, prompt:], v[:, prompt:])
    return cache


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    present: Tensor | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v in fp64: q [Hq, D], k and v [H, n, D] -> [Hq, D].

    present: [H, n] bool - tokens that attention sees; None: all
    cap, sinks: as in `Softmax`
    """
    per_head = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(per_head, 0) for x in (k, v))
    scores = torch.einsum("hd,hnd->hn", q.double(), k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if present is not None:
        scores = scores.masked_fill(~present.repeat_interleave(per_head, 0), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None].double()], 1)
    return torch.einsum("hn,hnd->hd", scores.softmax(-1)[:, : k.shape[1]], v)


def relative_error(x: Tensor, expected: Tensor) -> float:
    """|x - expected| / |expected|, in fp64."""
    expected = expected.double()
    return float((x.double() - expected).norm() / expected.norm())
