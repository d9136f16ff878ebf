"""Partial answers become one, however many there are."""

import pytest
import torch

from disagg.kernels import paged_attention, reference, reference_kept

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_merge_as_in_the_reference(count):
    generator = torch.Generator().manual_seed(count)
    parts = []
    for _ in range(count):
        o = torch.randn(2, 3, 5, 80, generator=generator)
        lse = 200 * torch.randn(2, 3, 5, generator=generator)
        unseen = torch.rand(lse.shape, generator=generator) < 0.4
        unseen[0, 0, 0] = True
        parts.append((o.masked_fill(unseen[..., None], 0.0), lse.masked_fill(unseen, -torch.inf)))
    on_device = [(o.to(DEVICE), lse.to(DEVICE)) for o, lse in parts]
    expected, total = reference_kept.join(parts)
    o, lse = (x.cpu() for x in paged_attention.join(on_device))
    assert torch.allclose(o, expected, atol=1e-5)
    assert torch.allclose(lse, total, atol=1e-4)
    assert torch.equal(paged_attention.merge(on_device).cpu(), o)
    assert torch.allclose(o, reference.merge(parts), atol=1e-5)
    assert lse[0, 0, 0] == -torch.inf


def test_parts_that_would_be_misread_are_refused():
    part = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match="fp32"):
        paged_attention.join([part, (part[0].double(), part[1])])
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention.join([part, (part[0].transpose(2, 3), part[1])])
