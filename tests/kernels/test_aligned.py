"""Triton on bit planes: the choice of bits of the reference, and its attention."""

import pytest
import torch

from disagg.kernels import ops
from disagg.kernels.gpu import aligned as gpu_aligned
from disagg.kernels.gpu import attend as gpu
from disagg.kernels.gpu.combine import merge
from disagg.kernels.gpu.plan import units_of
from disagg.kernels.reference import aligned
from disagg.kernels.sealing import Target
from tests.kernels import cases
from tests.synthetic import relative_error


def check(case: cases.Case):
    """Against the reference, and against attention on all 16 bits."""
    answer, bits = attend(case)
    o, lse = (x.cpu() for x in answer)
    expected, counted = aligned.attend(case.q, case.view, 0.2)
    cases.assert_alike((o, lse), expected, 1e-3, 2e-3, 1e-3)
    sees = lse > -torch.inf
    assert torch.equal(bits.k.cpu()[sees], counted.k[sees])
    assert torch.allclose(bits.v.cpu(), counted.v, atol=0.05)
    assert relative_error(o, cases.exact_attention(case, 0.2)[0]) <= 2**-8


@pytest.mark.parametrize("at_once", [1, 2 * 4 * cases.T * 48])
def test_sequences_and_heads_attend_alone_as_they_do_together(at_once, monkeypatch):
    case = cases.make_case(
        cases.aligned_format(48), [250, 3, 130], heads=3, width=2, m=2
    )
    (o, lse), bits = aligned.attend(case.q, case.view, 0.2)
    monkeypatch.setattr(aligned, "CHUNK_ELEMENTS", at_once)

    alone, bits_alone = aligned.attend(case.q, case.view, 0.2)

    assert torch.allclose(alone[0], o, atol=1e-5)
    assert torch.allclose(alone[1], lse, atol=1e-5)
    assert torch.equal(bits_alone.k, bits.k)
    assert torch.allclose(bits_alone.v, bits.v, atol=0.01)


@pytest.mark.parametrize(
    ("head_dim", "lengths", "heads", "width", "m"),
    [
        (64, [140, 1], 2, 3, 1),
        (80, [390], 1, 5, 1),
        (128, [200, 70, 0], 1, 2, 2),
    ],
)
def test_attention_reads_the_bits_that_the_reference_reads(
    head_dim, lengths, heads, width, m
):
    fmt = cases.aligned_format(head_dim)
    check(cases.make_case(fmt, lengths, heads, width, m))


def test_a_window_sees_its_own_pages_and_no_others():
    case = cases.make_case(cases.aligned_format(64), [390, 330], 1, 4)
    check(case.seeing(lo=torch.tensor([[200], [329]]).int()))


def test_units_of_work_far_below_the_others_add_nothing():
    case = cases.make_case(cases.aligned_format(64), [450], 1, 2)
    k, v = (x[0] for x in cases.random_kv([450], 1, 64, cases.T))
    k[0, 0, 5] = 8.0
    view = case.view
    ops.encode(k, v, view.fmt, target=Target(view.arena, view.pages[0], view.base))
    q = torch.full((1, 1, 2, 64), 4.0)
    check(cases.Case(q, view, k[None].half(), v[None].half()))


def test_no_more_bits_are_read_than_are_counted():
    """Planes that no query reads change nothing."""
    fmt = cases.aligned_format(64)
    case = cases.make_case(fmt, [128], 1, 1)
    (o, _), bits = attend(case)

    assert bits.k.mean() < 16

    levels = reference_levels(case)
    view = case.view
    start = int(view.pages[0, 0]) * 128 + view.base
    block = view.arena[start : start + fmt.block_bytes]
    size = cases.T // 2 * 64
    low = block[fmt.k_low : fmt.k_low + size].view(64, cases.T // 2)
    middle = block[fmt.k_middle : fmt.k_middle + size].view(64, cases.T // 2)
    low[levels > 0] ^= 0xFF
    middle[levels > 1] ^= 0xFF

    assert (levels > 0).any()
    assert torch.equal(attend(case)[0][0], o)

    low[levels == 0] ^= 0xFF

    assert not torch.equal(attend(case)[0][0], o)


def attend(case: cases.Case):
    q, view = case.on(cases.DEVICE)
    partials = gpu.attend(q, [view], 0.2)
    units = units_of([view], q.device)
    count = gpu_aligned.attend(q, view, 0.2, 0, units, partials.o, partials.lse)
    return merge(partials), count()


def reference_levels(case: cases.Case) -> torch.Tensor:
    """How many planes of each channel of K are left out: [D], for one query of one head."""
    top = case.k[0, 0].half().abs().amax(0).view(torch.int16).int() >> 10
    columns = case.q[0, 0, 0, :, None][None, None] * 0.2
    drops = aligned.k_drops(columns, top[None, None, :, None])
    return aligned.levels_of(drops)[0, 0, :, 0]
