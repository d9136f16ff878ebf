"""Outliers: numbers that a column keeps in sparse slots, in plain torch."""

import torch
from torch import Tensor

from disagg.kernels.formats_paged import Sparse


def choose_outliers(x: Tensor, sparse: Sparse) -> Tensor:
    """Rows of the outliers of each column: x [..., rows, columns] -> [..., columns, slots] i64.

    All rows of a column differ. Of equals the choice is torch's.
    """
    by_column = x.transpose(-1, -2)
    if not sparse.ends:
        mean = by_column.mean(-1, keepdim=True)
        return (by_column - mean).abs().topk(sparse.slots, -1).indices
    largest = by_column.topk(sparse.slots // 2, -1).indices
    others = by_column.scatter(-1, largest, torch.inf)
    smallest = others.topk(sparse.slots // 2, -1, largest=False).indices
    return torch.cat([largest, smallest], -1)


def with_means(x: Tensor, index: Tensor) -> Tensor:
    """x with the mean of each column in the place of its outliers, so that they widen no range."""
    by_column = x.transpose(-1, -2)
    mean = by_column.mean(-1, keepdim=True).expand(index.shape)
    return by_column.scatter(-1, index, mean).transpose(-1, -2)
