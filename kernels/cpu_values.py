"""Weighted sums of values of many pages on a CPU: weights times the codes of V.

The codes of a tile lie side by side, so that all tokens of a sequence in it are one multiplication.
The scale of a token goes into its weight. Outliers are added to their code, in units of its scale.
"""

from collections.abc import Iterator
from itertools import groupby

from torch import Tensor

from disagg.kernels.cpu_codes import as_read, tiles_side_by_side, weights_of
from disagg.kernels.cpu_pages import Pages
from disagg.kernels.formats_paged import Side


def sum_pages(pages: Pages, side: Side, weights: Tensor, into: Tensor, count: int) -> Tensor:
    """Weights [F, H, N, tokens] -> sums [count, H, N, D], of the pages with the same `into`.

    into: [F] i64, below `count`; scales are not by row
    """
    scales, zeros = pages.scales(side)  # [F, H, groups, tokens]: for groups of channels
    outliers = pages.outliers(side, scales)
    if outliers is not None:
        rows, amounts = (_side_by_side(y, side).flatten(2) for y in outliers)
    (_, heads, n, tokens), groups = weights.shape, scales.shape[2]
    x = _side_by_side(weights, side)  # [H, N, F, tokens]
    folded = [(x * y.unsqueeze(1)).flatten(2) for y in _side_by_side(scales, side).unbind(1)]
    found = weights.new_zeros(count, groups, heads, n, side.rows // groups)
    places = into.tolist()
    for tile, codes in tiles_side_by_side(pages.blocks, side):
        start = tile.start * tokens
        if outliers is not None:
            part = slice(start, start + codes.shape[2])
            codes.scatter_add_(1, rows[..., part], amounts[..., part])
        parts = codes.unflatten(1, (groups, -1))
        for place, first, last in _runs(places[tile]):
            run = slice(first * tokens, last * tokens)
            here = slice(start + run.start, start + run.stop)
            for group in range(groups):
                matrix = parts[:, group, :, run]
                found[place, group].baddbmm_(folded[group][:, :, here], matrix.mT)
    found.mul_(weights_of(side).view(groups, 1, 1, -1))
    bias = (scales * zeros).flatten(0, 1) @ weights.flatten(0, 1).mT  # [F * H, groups, N]
    every = weights.new_zeros(count, heads, groups, n)
    every.index_add_(0, into, bias.unflatten(0, (-1, heads)))
    found += every.transpose(1, 2).unsqueeze(4)
    return found.permute(0, 2, 3, 1, 4).flatten(3)


def _side_by_side(x: Tensor, side: Side) -> Tensor:
    """Pages x [F, H, m, tokens] -> [H, m, F, tokens], tokens in the order in which codes are."""
    return as_read(x, side).permute(1, 2, 0, 3).contiguous()


def _runs(places: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of equal numbers: the number, first index, end index."""
    start = 0
    for place, equal in groupby(places):
        end = start + len(list(equal))
        yield place, start, end
        start = end
