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
        return _largest((by_column - mean).abs(), sparse.slots)
    largest = _largest(by_column, sparse.slots // 2)
    others = (-by_column).scatter_(-1, largest, -torch.inf)
    return torch.cat([largest, _largest(others, sparse.slots // 2)], -1)


def with_means(x: Tensor, index: Tensor) -> Tensor:
    """x with the mean of each column in the place of its outliers, so that they widen no range."""
    by_column = x.transpose(-1, -2)
    mean = by_column.mean(-1, keepdim=True).expand(index.shape)
    return by_column.scatter(-1, index, mean).transpose(-1, -2)


def _largest(x: Tensor, count: int) -> Tensor:
    """Places of the `count` largest along the last axis; a single one is found without sorting."""
    if count == 1:
        return x.max(-1, keepdim=True).indices
    return x.topk(count, -1).indices
