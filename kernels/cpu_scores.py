"""Scores of many pages on a CPU: queries times the codes of K.

With x = scale * (code + zero) the scale goes into the query where each channel has its own, and
into the score where each token has. Outliers are added to their code, in units of its scale.
"""

import torch
from torch import Tensor

from disagg.kernels.cpu_codes import as_read, tiles_by_page, weights_of
from disagg.kernels.cpu_pages import Pages
from disagg.kernels.formats_paged import Side


def score_pages(pages: Pages, side: Side, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Queries x [F, H, N, D] -> scores [F, H, N, groups, tokens / groups].

    returns: the scores, and what is still to be added to those of a group: [F, H, N, groups]
    """
    if side.scale.by == "row":
        return _by_token(pages, side, x), None
    return _by_channel(pages, side, x)


def _by_channel(pages: Pages, side: Side, x: Tensor) -> tuple[Tensor, Tensor]:
    """Where channels have scales, for groups of tokens; or all numbers of a page have one."""
    scales, zeros = pages.scales(side)  # [F, H, groups, D]
    outliers = pages.outliers(side, scales)
    if outliers is not None:
        rows, amounts = (as_read(y, side).flatten(0, 1) for y in outliers)
    groups, (_, heads, n, _) = scales.shape[2], x.shape
    folded = [as_read(x * scales[:, :, i, None], side).flatten(0, 1) for i in range(groups)]
    found = x.new_empty(groups, len(folded[0]), n, side.rows // groups)
    for blocks, codes in tiles_by_page(pages.blocks, side):
        if outliers is not None:
            codes.scatter_add_(1, rows[blocks], amounts[blocks])
        parts = codes.unflatten(1, (groups, -1))
        for group in range(groups):
            torch.bmm(folded[group][blocks], parts[:, group].mT, out=found[group, blocks])
    found.mul_(weights_of(side).view(groups, 1, 1, -1))
    bias = (scales * zeros).flatten(0, 1) @ x.flatten(0, 1).mT  # [F * H, groups, N]
    found = found.unflatten(1, (-1, heads)).permute(1, 2, 3, 0, 4)
    return found, bias.mT.unflatten(0, (-1, heads))


def _by_token(pages: Pages, side: Side, x: Tensor) -> Tensor:
    """Where tokens have scales, for groups of channels: a query for each group, 0 elsewhere."""
    scales, zeros = (y.unsqueeze(3) for y in pages.scales(side))  # [F, H, groups, 1, tokens]
    groups, n = scales.shape[2], x.shape[2]
    own = torch.eye(groups).repeat_interleave(side.scale.group, 1).unsqueeze(1)
    queries = x.unsqueeze(2) * own  # [F, H, groups, N, D]
    total = queries.sum(4, keepdim=True)
    rows = as_read(queries, side).flatten(2, 3).flatten(0, 1)
    sums = x.new_empty(len(rows), groups * n, side.rows)
    for blocks, codes in tiles_by_page(pages.blocks, side):
        torch.bmm(rows[blocks], codes.mT, out=sums[blocks])
    sums = sums.view(*queries.shape[:4], -1)
    found = sums.mul_(scales * weights_of(side)).addcmul_(total, scales * zeros)
    return found.sum(2).unsqueeze(3)
