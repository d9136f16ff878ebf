"""The Triton append writes the very bytes of the reference, pages that it completes included."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from disagg.kernels.cpu.append import append as cpu_append
from disagg.kernels.formats import ExactFormat
from disagg.kernels.gpu.append import append
from disagg.kernels.reference import codes
from disagg.kernels.reference import encode as reference
from disagg.kernels.reference.pages import load_blocks
from disagg.kernels.sealing import NO_PAGE, NewRows, Sealing, SealRows
from tests.kernels.cases import (
    BASE,
    DEVICE,
    FORMATS,
    make_format,
    quant_format,
    random_kv,
    raw_format,
)
from tests.synthetic import relative_error

HEADS = 2
DROPPED = ExactFormat("float16", 80, 4 * 64 * 80, 0, 2 * 64 * 80, slots=64, tokens=64)
SEALED = {
    "kivi-4bit": quant_format(4, 64, 32, 64),
    "narrow": make_format(head_dim=48, bits=2, group=16),
    "D256-in-two-blocks": quant_format(4, 256, 64, 64),
    "dropped": DROPPED,
}
SEALED |= {x: make_format(**FORMATS[x]) for x in ("kivi", "pertoken", "pertoken-2bit")}
SEALED |= {x: make_format(**FORMATS[x]) for x in ("int8", "fp8")}


def to_device(*tensors: Tensor) -> list[Tensor]:
    return [x.to(DEVICE) for x in tensors]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bytes_equal_those_of_the_reference(dtype):
    fmt, heads = raw_format(dtype, 80), 3
    rows = torch.randn(6, heads, 3 * 80).to(getattr(torch, dtype))
    k, v = rows[..., 80:160], rows[..., 160:]  # views, as a fused projection gives them
    pages = torch.tensor([600, 0, 300, NO_PAGE, 0, 300], dtype=torch.int32)
    slots = torch.tensor([15, 0, 7, 2, 1, 8], dtype=torch.int32)
    expected = torch.zeros(1000 * 128, dtype=torch.uint8)
    arena = expected.to(DEVICE, copy=True)
    reference.append(expected, k, v, NewRows(pages, slots, fmt, BASE))
    moved = to_device(k, v, pages, slots)
    append(arena, *moved[:2], NewRows(*moved[2:], fmt, BASE))
    assert torch.equal(arena.cpu(), expected)
    item = getattr(torch, dtype).itemsize
    assert (expected != 0).sum() > 5 * heads * 2 * 80 * (item - 1)  # five of six rows
    assert (expected != 0).sum() <= 5 * heads * 2 * 80 * item


def test_scattered_channels_and_ids_are_read_where_they_are():
    """As on a CPU: how a model lays its K out, and a step its tables, is their own affair."""
    fmt, there = raw_format("float32", 64), torch.zeros(3, 9 * 65536, dtype=torch.uint8)
    k, v = torch.randn(2, 64, 3).transpose(1, 2)[:, ::2], torch.randn(2, 2, 128)[..., ::2]
    pages, slots = torch.tensor([[0, 3], [600, 9]]).int().unbind(1)
    for run, arena in zip((reference.append, cpu_append), there, strict=False):
        run(arena, k, v, NewRows(pages, slots, fmt, BASE))
    arena, *moved = to_device(there[2], k, v, pages, slots)
    append(arena, *moved[:2], NewRows(*moved[2:], fmt, BASE))
    assert there[0].any()
    assert torch.equal(there[0], there[1])
    assert torch.equal(there[0], arena.cpu())


def page_ids(fmt, raw: ExactFormat) -> tuple[int, int]:
    """What a page id grows by, and the id of the page that is sealed."""
    stride = -(-(BASE + HEADS * max(raw.block_bytes, fmt.block_bytes)) // 128)
    return stride, 9 * stride


def make_tail(fmt, raw: ExactFormat, own: bool):
    """Two tails of T tokens and a row for each; the second one's page is complete.

    own: whether the row's token is the last one of that page; else it goes to another raw page
    """
    stride, page = page_ids(fmt, raw)
    tails = torch.randperm(8, generator=torch.Generator().manual_seed(5)).view(2, 4) * stride
    pages = torch.tensor([tails[0, 1], tails[1, 3] if own else 8 * stride])
    slots = torch.tensor([6, 15 if own else 0])
    rows = SealRows(
        pages=torch.tensor([NO_PAGE, page]).int(),
        tails=tails.int(),
        segments=torch.tensor([0, 0]).int(),
        stretches=torch.tensor([0, 12]).int(),
    )
    arena = torch.full((10 * stride * 128 + 4096,), 0x5A, dtype=torch.uint8)
    whole = (x[0].to(getattr(torch, raw.dtype)) for x in random_kv([64], HEADS, raw.head_dim, 64))
    k, v = (x.transpose(0, 1) for x in whole)  # [T, H, D]
    at = tails[1].int().repeat_interleave(16)
    slot = torch.arange(16).repeat(4).int()
    reference.append(arena, k, v, NewRows(at, slot, raw, BASE))
    if own:  # what was in its place before
        x = torch.full_like(k[-1:], 7)
        reference.append(arena, x, x, NewRows(at[-1:], slot[-1:], raw, BASE))
    new_k, new_v = (torch.stack([x[3] + 1, x[-1] if own else x[5]]) for x in (k, v))
    return arena, new_k, new_v, pages.int(), slots.int(), rows


def append_both(fmt, raw: ExactFormat, own: bool, seed: int = 3 << 20) -> tuple[Tensor, Tensor]:
    expected, k, v, pages, slots, rows = make_tail(fmt, raw, own)
    found = expected.to(DEVICE, copy=True)
    sealing = Sealing(rows, fmt, BASE, seed=seed)
    reference.append(expected, k, v, NewRows(pages, slots, raw, BASE), sealing)
    moved = SealRows(*to_device(rows.pages, rows.tails, rows.segments, rows.stretches))
    sealing = replace(sealing, rows=moved)
    k, v, pages, slots = to_device(k, v, pages, slots)
    append(found, k, v, NewRows(pages, slots, raw, BASE), sealing)
    return found.cpu(), expected


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in SEALED), ("kivi-4bit", "bfloat16")]
)
def test_completed_pages_are_those_of_the_reference(name, dtype, own):
    fmt = SEALED[name]
    assert fmt.is_sealable
    raw = raw_format(dtype, fmt.head_dim)
    found, expected = append_both(fmt, raw, own)
    assert torch.equal(found, expected)
    block = load_blocks(expected, torch.tensor(page_ids(fmt, raw)[1:2]), BASE, HEADS, 64)
    assert not (block == 0x5A).all()


@pytest.mark.parametrize("name", ["gear-l-own", "gear-own", "gear-odd-own"])
def test_completed_pages_with_factors_stand_for_what_those_of_the_reference_do(name):
    fmt = make_format(**FORMATS[name])
    assert fmt.is_sealable
    raw, decoded = raw_format("float16", fmt.head_dim), []
    page = torch.tensor(page_ids(fmt, raw)[1:])
    for arena in append_both(fmt, raw, True):
        block = load_blocks(arena, page, BASE, HEADS, fmt.block_bytes)
        decoded.append(codes.decode(block, None, fmt))
    for x, y in zip(*decoded, strict=True):
        assert relative_error(x, y.double()) <= 1e-3


def test_pages_that_need_more_than_one_tile_or_a_segment_are_not_for_an_append():
    for name in ("decoquant", "ott", "kcvt", "gear"):
        assert not make_format(**FORMATS[name]).is_sealable
    assert not replace(DROPPED, positions=0).is_sealable
