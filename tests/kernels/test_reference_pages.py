"""Bytes go to and come from where page ids say."""

import pytest
import torch

from disagg.kernels.reference_pages import append_raw, gather_raw, load_blocks, store_blocks
from tests.kernels.cases import BASE, raw_format


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_appended_tokens_are_gathered_in_order(dtype):
    fmt = raw_format(dtype, 80)
    heads, n, stride = 3, 37, 1024
    k = torch.randn(n, heads, 80).to(getattr(torch, dtype))
    v = torch.randn(n, heads, 80).to(getattr(torch, dtype))
    arena = torch.zeros(8 * stride * 128, dtype=torch.uint8)
    table = torch.tensor([[5, 0, 3]], dtype=torch.int32) * stride
    for i in range(n):
        page, slot = table[0, i // 16 : i // 16 + 1], torch.tensor([i % 16], dtype=torch.int32)
        append_raw(arena, k[i : i + 1], v[i : i + 1], page, slot, fmt, BASE)
    gathered_k, gathered_v = gather_raw(arena, table, fmt, BASE, heads)
    assert torch.equal(gathered_k[0, :, :n], k.transpose(0, 1))
    assert torch.equal(gathered_v[0, :, :n], v.transpose(0, 1))
    assert not gathered_k[0, :, n:].any()
    assert int((arena != 0).nonzero().max()) < 6 * stride * 128


def test_stored_blocks_are_loaded_from_where_their_ids_say():
    blocks = torch.randint(0, 256, (3, 2, 48), dtype=torch.uint8)
    arena = torch.zeros(4096, dtype=torch.uint8)
    pages = torch.tensor([9, 2, 30], dtype=torch.int32)
    store_blocks(arena, blocks, pages, 16)
    assert torch.equal(load_blocks(arena, pages, 16, 2, 48), blocks)
    assert torch.equal(arena[2 * 128 + 16 : 2 * 128 + 112], blocks[1].flatten())
    assert int((arena != 0).sum()) == int((blocks != 0).sum())
