"""From logits to tokens. Randomness is a function of (seed, token index) and of nothing else.

So a token does not depend on the batch it was sampled in, on the worker, or on how often its
sequence was started: no sampler state travels.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from disagg.engine.sequence import SamplingParams


def sample(logits: Tensor, params: Sequence[SamplingParams], indices: Sequence[int]) -> list[int]:
    """One token for each row.

    logits:  [B, V] fp32
    params:  per row, how to choose
    indices: per row, the index of the token in its answer
    """
    best = logits.argmax(dim=-1).tolist()
    return [
        _draw(logits[row], choice, index) if choice.temperature else best[row]
        for row, (choice, index) in enumerate(zip(params, indices, strict=True))
    ]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that stands for (seed, token index)."""
    text = f"{seed}:{index}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return (bits >> 11) / (1 << 53)


def _draw(logits: Tensor, params: SamplingParams, index: int) -> int:
    """Inverse transform sampling: tokens by falling probability share [0, 1) between them."""
    scores, tokens = logits.double().sort(descending=True, stable=True)
    if params.top_k:
        scores = scores[: params.top_k]
    shares = ((scores - scores[0]) / params.temperature).softmax(0).cumsum(0)
    if params.top_p < 1:
        kept = int((shares < params.top_p).sum()) + 1
        shares = shares[:kept] / shares[min(kept, len(shares)) - 1]
    target = torch.tensor([uniform(params.seed, index)], dtype=shares.dtype, device=shares.device)
    place = int(torch.searchsorted(shares, target, right=True))
    return int(tokens[min(place, len(shares) - 1)])
