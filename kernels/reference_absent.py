"""Tokens that are not among the codes of their page, in plain torch: encode_absent.py's spec."""

import torch
from torch import Tensor


def with_group_means(x: Tensor, absent: Tensor, group: int) -> Tensor:
    """x [H, n, D] fp32 with the mean of the others of its group in the place of absent tokens."""
    groups = x.unflatten(1, (-1, group))
    there = (~absent).unflatten(1, (-1, group)).unsqueeze(-1)
    mean = (groups * there).sum(2, keepdim=True) / there.sum(2, keepdim=True).clamp_min(1)
    return torch.where(there, groups, mean).flatten(1, 2)


def pack_mask(absent: Tensor, tokens: int) -> Tensor:
    """Bits of the tokens of pages that are there, low bit first.

    absent: [H, n] bool; returns [n / tokens, H, tokens / 8] u8
    """
    bits = (~absent).unflatten(1, (-1, tokens // 8, 8)).transpose(0, 1)
    weights = 1 << torch.arange(8, device=absent.device)
    return (bits * weights).sum(-1).to(torch.uint8)
