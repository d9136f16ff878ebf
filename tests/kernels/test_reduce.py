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
    int32,
    make_case,
    quant_format,
    raw_format,
)
from tests.synthetic import relative_error


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_units_of_codes_of_a_tail_and_of_planes_are_one_answer(dtype):
    # the last sequence is in the codes alone
    lengths_by_format = {
        quant_format(2, 64, 32, 32): [450, 0, 70],
        raw_format("float32", 64): [33, 1, 0],
        aligned_format(64): [0, 80, 0],
    }
    cases = [
        make_case(fmt, lengths, heads=2, width=3)
        for fmt, lengths in lengths_by_format.items()
    ]
    same_queries = [replace(case, q=cases[0].q) for case in cases]
    answers = [exact_attention(case, 0.2) for case in same_queries]
    expected = softmax.merge(answers)

    q = cases[0].q.to(DEVICE, getattr(torch, dtype))
    views = [view for _, view in (case.on(DEVICE) for case in cases)]
    strided = torch.cat([q, q], 3)[..., :64]  # as a fused projection gives it
    partials = gpu.attend(strided, views, 0.2)
    o, _ = merge(partials, q.dtype)

    assert o.dtype == q.dtype
    assert relative_error(o.cpu(), expected) <= 4e-3


@pytest.mark.parametrize("units", [1, 33, 40, 130])
def test_any_number_of_units_of_a_sequence_is_one_answer(units):
    generator = torch.Generator().manual_seed(units)
    slots = units + 9  # 9 belong to no sequence
    o = torch.randn(slots, 3, 80, generator=generator)
    lse = torch.randn(slots, 3, generator=generator) * 9  # log2
    natural = lse[:units] * math.log(2)
    weights = natural.softmax(0)
    weighted = o[:units] * weights.unsqueeze(2)

    partials = UnitPartials(
        o=o.to(DEVICE),
        lse=lse.to(DEVICE),
        queries=(1, 1, 3),
        starts=int32(0, units).to(DEVICE),
    )
    merged, merged_lse = (x.cpu() for x in merge(partials))

    assert torch.allclose(merged[0, 0], weighted.sum(0), atol=1e-5)
    assert torch.allclose(merged_lse[0, 0], natural.logsumexp(0), atol=1e-4)
