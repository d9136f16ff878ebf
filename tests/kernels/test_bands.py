"""The Triton kernels on K in bands of columns and V turned, against what the pages stand for."""

import pytest
import torch

from disagg.kernels.gpu.append import append
from disagg.kernels.gpu.encode import encode
from disagg.kernels.reference import encode as reference
from disagg.kernels.reference.pages import store_blocks
from disagg.kernels.sealing import NewRows, Sealing, SealRows, Segmentation, Target
from tests.kernels.cases import (
    BASE,
    DEVICE,
    SEGMENT_BASE,
    banded_format,
    make_case,
    random_kv,
    random_segment,
    raw_format,
)
from tests.kernels.test_attention import check

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter: log2(0)


@pytest.mark.parametrize(
    ("bits", "head_dim", "width", "m"),
    [(2, 64, 3, 1), (3, 64, 8, 1), (2, 128, 4, 1), (3, 128, 5, 2), (2, 256, 1, 1)],
)
def test_bands_are_attended_as_what_they_stand_for(bits, head_dim, width, m):
    check(make_case(banded_format(bits, head_dim), [200, 70, 0], 1, width, m=m, run=2))


@pytest.mark.parametrize(("bits", "head_dim", "heads"), [(2, 64, 2), (3, 128, 1), (2, 256, 1)])
def test_bytes_of_bands_are_those_of_the_reference(bits, head_dim, heads):
    fmt = banded_format(bits, head_dim)
    k, v = (x[0].half() for x in random_kv([128], heads, head_dim, 64))
    k[0, 3, 5], v[-1, 70, 9], k[-1, 64:, 2] = float("inf"), 6e4, 0.25
    cut = Segmentation(128, 0, random_segment(fmt, heads, 0))
    wanted, segments = reference.encode(k, v, fmt, cut)
    there = Segmentation(128, 0, cut.frozen.to(DEVICE))
    found, shared = encode(k.to(DEVICE), v.to(DEVICE), fmt, there)
    assert torch.equal(shared.cpu(), segments)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize(("bits", "head_dim"), [(2, 64), (3, 64), (2, 256)])
def test_an_append_seals_a_page_in_the_order_of_its_segment(bits, head_dim):
    fmt, raw, heads = banded_format(bits, head_dim), raw_format("float16", head_dim), 2
    assert fmt.is_sealable
    view = make_case(raw, [64], heads, 1).view
    stride = -(-(BASE + heads * max(fmt.block_bytes, fmt.segment_bytes)) // 128)
    first = view.arena.numel() // 128
    arena = torch.cat([view.arena, torch.zeros(3 * stride * 128, dtype=torch.uint8)])
    ids = torch.tensor([first, first + stride]).int()
    store_blocks(Target(arena, ids[1:], SEGMENT_BASE), random_segment(fmt, heads, 4)[None])
    seeds = (torch.Generator().manual_seed(i) for i in (1, 2))
    k, v = (torch.randn(1, heads, head_dim, generator=seeded) for seeded in seeds)
    rows = SealRows(ids[:1], view.pages, ids[1:], torch.zeros(1).int())
    new = view.pages[:, 3].contiguous(), torch.tensor([15]).int()
    expected, found = arena.clone(), arena.to(DEVICE, copy=True)
    sealing = Sealing(rows, fmt, BASE, SEGMENT_BASE)
    reference.append(expected, k.half(), v.half(), NewRows(*new, raw, BASE), sealing)
    moved = Sealing(SealRows(*(x.to(DEVICE) for x in vars(rows).values())), fmt, BASE, SEGMENT_BASE)
    new = [x.to(DEVICE) for x in new]
    append(found, k.to(DEVICE), v.to(DEVICE), NewRows(*new, raw, BASE), moved)
    assert torch.equal(found.cpu(), expected)
    block = slice(first * 128 + BASE, first * 128 + BASE + fmt.block_bytes)
    assert not torch.equal(expected[block], arena[block])
