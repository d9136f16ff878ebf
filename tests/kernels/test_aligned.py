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

SCALE = 0.2


def attend(case: cases.Case):
    """Attention by Triton: o and lse, and the bits that it read."""
    q, view = case.on(cases.DEVICE)
    partials = gpu.attend(q, [view], SCALE)
    count = gpu_aligned.attend(
        q,
        view,
        SCALE,
        0,
        units_of([view], q.device),
        partials.o,
        partials.lse,
    )
    return merge(partials), count()


def check(case: cases.Case):
    """Against the reference, and against attention on all 16 bits."""
    expected, expected_bits = aligned.attend(case.q, case.view, SCALE)
    exact, _ = cases.exact_attention(case, SCALE)

    answer, bits = attend(case)

    o, lse = (x.cpu() for x in answer)
    cases.assert_alike(
        (o, lse),
        expected,
        tolerance=1e-3,
        near=2e-3,
        rtol=1e-3,
    )
    sees = lse > -torch.inf
    k_bits = bits.k.cpu()
    v_bits = bits.v.cpu()
    assert torch.equal(k_bits[sees], expected_bits.k[sees])
    assert torch.allclose(v_bits, expected_bits.v, atol=0.05)
    assert relative_error(o, exact) <= 2**-8


@pytest.mark.parametrize("at_once", [1, 2 * 4 * cases.T * 48])
def test_sequences_and_heads_attend_alone_as_together(at_once, monkeypatch):
    case = cases.make_case(
        cases.aligned_format(48),
        lengths=[250, 3, 130],
        heads=3,
        width=2,
        m=2,
    )
    (o, lse), bits = aligned.attend(case.q, case.view, SCALE)

    monkeypatch.setattr(aligned, "CHUNK_ELEMENTS", at_once)
    answer_alone, bits_alone = aligned.attend(case.q, case.view, SCALE)

    o_alone, lse_alone = answer_alone
    assert torch.allclose(o_alone, o, atol=1e-5)
    assert torch.allclose(lse_alone, lse, atol=1e-5)
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
    case = cases.make_case(fmt, lengths, heads, width, m)

    check(case)


def test_a_window_sees_its_own_pages_and_no_others():
    fmt = cases.aligned_format(64)
    case = cases.make_case(fmt, [390, 330], heads=1, width=4)
    windowed = case.seeing(lo=cases.int32([200], [329]))

    check(windowed)


def test_units_of_work_far_below_the_others_add_nothing():
    fmt = cases.aligned_format(64)
    n = 450
    view = cases.make_case(fmt, [n], heads=1, width=2).view
    k, v = cases.sequence_kv(n, heads=1, head_dim=64)
    k[0, 0, 5] = 8.0
    target = Target(view.arena, view.pages[0], view.base)
    ops.encode(k, v, fmt, target=target)
    case = cases.Case(
        q=torch.full((1, 1, 2, 64), 4.0),
        view=view,
        k=k[None].half(),
        v=v[None].half(),
    )

    check(case)


def reference_levels(case: cases.Case) -> torch.Tensor:
    """How many planes of each channel of K are left out: [D], for one query of one head."""
    k = case.k[0, 0].half()
    top_exponents = k.abs().amax(0).view(torch.int16).int() >> 10
    q = case.q[0, 0, 0] * SCALE
    drops = aligned.k_drops(
        q.view(1, 1, -1, 1),
        top_exponents.view(1, 1, -1, 1),
    )
    return aligned.levels_of(drops).view(-1)


def k_planes(case: cases.Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The low and the middle plane of K in the first page: views [D, T / 2] of the arena."""
    fmt = case.view.fmt
    start = int(case.view.pages[0, 0]) * 128 + case.view.base
    block = case.view.arena[start:]
    shape = (fmt.head_dim, cases.T // 2)
    size = fmt.head_dim * cases.T // 2
    low = block[fmt.k_low : fmt.k_low + size]
    middle = block[fmt.k_middle : fmt.k_middle + size]
    return low.view(shape), middle.view(shape)


def test_no_more_bits_are_read_than_are_counted():
    """Planes that no query reads change nothing."""
    fmt = cases.aligned_format(64)
    case = cases.make_case(fmt, [128], heads=1, width=1)
    (o, _), bits = attend(case)
    assert bits.k.mean() < 16

    levels = reference_levels(case)
    low, middle = k_planes(case)
    assert (levels > 0).any()
    low[levels > 0] ^= 0xFF
    middle[levels > 1] ^= 0xFF
    (unread_changed, _), _ = attend(case)

    assert torch.equal(unread_changed, o)

    low[levels == 0] ^= 0xFF
    (read_changed, _), _ = attend(case)

    assert not torch.equal(read_changed, o)
