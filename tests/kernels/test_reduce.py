"""Partial results become one answer in one launch, whatever they come from."""

import math

import pytest
import torch

from disagg.kernels.gpu import codes as gpu_codes
from disagg.kernels.gpu import exact as gpu_exact
from disagg.kernels.gpu.reduce import UnitPartials, join, merge
from disagg.kernels.reference import exact, softmax
from tests.kernels.cases import (
    DEVICE,
    exact_attention,
    make_case,
    quant_format,
    raw_format,
    relative_error,
)

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log(0)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_pairs_of_the_reference_merge_as_in_the_reference(count):
    generator = torch.Generator().manual_seed(count)
    parts = []
    for _ in range(count):
        o = torch.randn(2, 3, 5, 80, generator=generator)
        lse = 200 * torch.randn(2, 3, 5, generator=generator)
        unseen = torch.rand(lse.shape, generator=generator) < 0.4
        unseen[0, 0, 0] = True
        parts.append((o.masked_fill(unseen[..., None], 0.0), lse.masked_fill(unseen, -torch.inf)))
    on_device = [(o.to(DEVICE), lse.to(DEVICE)) for o, lse in parts]
    o, lse = (x.cpu() for x in join(on_device))
    assert torch.allclose(o, softmax.merge(parts), atol=1e-5)
    assert torch.allclose(lse, torch.stack([x[1] for x in parts]).logsumexp(0), atol=1e-4)
    assert torch.equal(merge(on_device).cpu(), o)
    assert lse[0, 0, 0] == -torch.inf


def test_units_of_codes_of_a_tail_and_a_pair_are_one_answer():
    formats = quant_format(2, 64, 32, 32), raw_format("float16", 64), raw_format("float32", 64)
    lengths = [[450, 0, 70], [33, 1, 0], [20, 5, 0]]  # the last sequence is in the codes alone
    cases = [make_case(fmt, n, 2, 3) for fmt, n in zip(formats, lengths, strict=True)]
    found = [
        run.attend(*case.on(DEVICE), 0.2)
        for run, case in zip((gpu_codes, gpu_exact, exact), cases, strict=True)
    ]
    assert [isinstance(one, UnitPartials) for one in found] == [True, True, False]
    wanted = softmax.merge([exact_attention(case, 0.2) for case in cases])
    assert relative_error(merge(found).cpu(), wanted) <= 1e-3


@pytest.mark.parametrize("units", [1, 33, 40, 130])
def test_any_number_of_units_of_a_sequence_is_one_answer(units):
    generator = torch.Generator().manual_seed(units)
    o = torch.randn(units + 9, 3, 80, generator=generator)
    lse = 9 * torch.randn(units + 9, 3, generator=generator)  # log2; 9 slots are nobody's
    starts = torch.tensor([0, units], dtype=torch.int32, device=DEVICE)
    part = UnitPartials(o.to(DEVICE), lse.to(DEVICE), (1, 1, 3), starts)
    found, total = (x.cpu() for x in join([part]))
    weights = (lse[:units] * math.log(2)).softmax(0)
    assert torch.allclose(found[0, 0], (o[:units] * weights.unsqueeze(2)).sum(0), atol=1e-5)
    assert torch.allclose(total[0, 0], (lse[:units] * math.log(2)).logsumexp(0), atol=1e-4)


def test_partial_results_that_would_be_misread_are_refused():
    part = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match="fp32"):
        join([part, (part[0].double(), part[1])])
    with pytest.raises(ValueError, match="contiguous"):
        join([part, (part[0].transpose(2, 3), part[1])])
    with pytest.raises(ValueError, match="not of one answer"):
        join([part, (torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4))])
