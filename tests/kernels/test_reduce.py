"""Partial results become one answer in one launch, from any kind of pages."""

import math
from dataclasses import replace

import pytest
import torch

from disagg.kernels.gpu import attend as gpu
from disagg.kernels.gpu.combine import UnitPartials, merge
from disagg.kernels.reference import softmax
from tests.kernels.cases import (
    DEVICE,
    aligned_format,
    exact_attention,
    make_case,
    quant_format,
    raw_format,
)
from tests.synthetic import relative_error


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_units_of_codes_of_a_tail_and_of_planes_are_one_answer(dtype):
    formats = quant_format(2, 64, 32, 32), raw_format("float32", 64), aligned_format(64)
    # the last sequence is in the codes alone
    lengths = [[450, 0, 70], [33, 1, 0], [0, 80, 0]]
    cases = [make_case(fmt, n, 2, 3) for fmt, n in zip(formats, lengths, strict=True)]
    q = cases[0].q.to(getattr(torch, dtype)).to(DEVICE)
    strided = torch.cat([q, q], 3)[..., :64]  # as a fused projection gives it
    partials = gpu.attend(strided, [case.on(DEVICE)[1] for case in cases], 0.2)
    o, _ = merge(partials, q.dtype)

    same_queries = [replace(case, q=cases[0].q) for case in cases]
    expected = softmax.merge([exact_attention(case, 0.2) for case in same_queries])

    assert o.dtype == q.dtype
    assert relative_error(o.cpu(), expected) <= 4e-3


@pytest.mark.parametrize("units", [1, 33, 40, 130])
def test_any_number_of_units_of_a_sequence_is_one_answer(units):
    generator = torch.Generator().manual_seed(units)
    o = torch.randn(units + 9, 3, 80, generator=generator)
    # log2; 9 slots belong to no sequence
    lse = 9 * torch.randn(units + 9, 3, generator=generator)
    starts = torch.tensor([0, units], dtype=torch.int32, device=DEVICE)
    part = UnitPartials(o.to(DEVICE), lse.to(DEVICE), (1, 1, 3), starts)

    merged, merged_lse = (x.cpu() for x in merge(part))

    natural = lse[:units] * math.log(2)
    weights = natural.softmax(0)
    expected = (o[:units] * weights.unsqueeze(2)).sum(0)

    assert torch.allclose(merged[0, 0], expected, atol=1e-5)
    assert torch.allclose(merged_lse[0, 0], natural.logsumexp(0), atol=1e-4)
