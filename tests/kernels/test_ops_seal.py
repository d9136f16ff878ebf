"""Sealing into an arena: the bytes of encoding first and storing then, and what is refused."""

from dataclasses import replace

import pytest
import torch

from disagg.kernels import ops, ops_paged, ops_seal
from disagg.kernels.places import Places
from tests.kernels.cases import BASE, quant_format, random_kv
from tests.kernels.test_aligned import make_format as aligned_format
from tests.kernels.test_paged_pieces import FORMATS, make_format

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES = [700, 300, 2]


def arena_and_places() -> tuple[torch.Tensor, Places]:
    arena = torch.full((1400 * 128,), 0x5A, dtype=torch.uint8, device=DEVICE)
    pages = torch.tensor(PAGES, dtype=torch.int32, device=DEVICE)
    return arena.clone(), Places(arena, pages, BASE)


def numbers(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = random_kv([192], 2, head_dim, 64)
    return k[0].half().to(DEVICE), v[0].half().to(DEVICE)


def test_quantised_pages_are_those_that_are_stored_later():
    expected, places = arena_and_places()
    fmt, (k, v) = quant_format(2, 64, 32, 32), numbers(64)
    ops_seal.seal_quantized(k, v, places, fmt)
    ops.store_blocks(expected, ops.encode_quantized(k, v, fmt), places.pages, BASE)
    assert torch.equal(places.arena, expected)


@pytest.mark.parametrize("name", ["int8", "fp8", "kcvt", "gear"])
def test_pages_of_pieces_are_those_that_are_stored_later(name):
    expected, places = arena_and_places()
    fmt = make_format(**FORMATS[name])
    k, v = numbers(fmt.head_dim)
    segments = ops_seal.seal_segments(k, v, places, fmt, [1, 2], 128)
    blocks, wanted = ops_paged.encode_segments(k, v, fmt, [1, 2], 128)
    ops.store_blocks(expected, blocks, places.pages, BASE)
    assert torch.equal(places.arena, expected)
    assert (segments is None) == (wanted is None)
    assert segments is None or torch.equal(segments, wanted)


def test_bit_planes_are_those_that_are_stored_later():
    expected, places = arena_and_places()
    fmt, (k, v) = aligned_format(64), numbers(64)
    ops_seal.seal_aligned(k, v, places, fmt)
    ops.store_blocks(expected, ops_paged.encode_aligned(k, v, fmt), places.pages, BASE)
    assert torch.equal(places.arena, expected)


def test_what_would_be_written_elsewhere_is_refused():
    _, places = arena_and_places()
    fmt, (k, v) = quant_format(2, 64, 32, 32), numbers(64)
    for wrong, error in (
        (replace(places, pages=places.pages[:2]), ValueError),
        (replace(places, pages=places.pages.long()), TypeError),
        (replace(places, arena=places.arena.view(torch.int8)), TypeError),
    ):
        with pytest.raises(error):
            ops_seal.seal_quantized(k, v, wrong, fmt)
    with pytest.raises(ValueError, match="multiple of 64"):
        ops_seal.seal_quantized(k[:, :100], v[:, :100], places, fmt)
    with pytest.raises(TypeError):
        ops_seal.seal_aligned(k.int(), v.int(), places, aligned_format(64))
    pieces = make_format(**FORMATS["kcvt"])
    with pytest.raises(ValueError, match="seeds"):
        ops_seal.seal_segments(*numbers(80), places, pieces, [1], 64)
