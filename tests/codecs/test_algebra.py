"""Attention on pieces is exact algebra: in fp64 it equals attention on what they stand for."""

import pytest
import torch

from disagg.codecs import get_codec
from disagg.codecs.quantized import QuantizedCodec
from disagg.kernels.reference.codes import attend, decode
from disagg.kernels.reference.encode import encode
from disagg.kernels.reference.pages import store_blocks
from disagg.kernels.sealing import Segmentation, Target
from disagg.kernels.view import View
from tests.synthetic import exact_attention, realistic, relative_error

SPECS = [
    "pertoken:bits=2,group=32",
    "pertoken:bits=8,group=64",
    "int8",
    "fp8",
    "kcvt:bits=2",
    "decoquant",
    "gear:bits=4",
    "gear:bits=2,backbone=kivi,sparsity=0.046875",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("head_dim", "per_head"), [(64, 3), (128, 16), (256, 1)])
def test_attention_on_the_pieces_is_exact_in_fp64(spec: str, head_dim: int, per_head: int) -> None:
    codec, heads = get_codec(spec), 2
    assert isinstance(codec, QuantizedCodec)
    segment = codec.segment_layout(head_dim)
    fmt = codec.format_of(codec.page_layout(head_dim), segment, head_dim)
    arena = torch.zeros(1 << 22, dtype=torch.uint8)
    pages, exact, owner, segments = [], [], [], []
    end = 1  # in units of 128 bytes
    for index, count in enumerate((3, 1, 2)):  # pages of three segments
        k, v = realistic(heads, count * fmt.tokens, head_dim, seed=index)
        blocks, shared = encode(k, v, fmt, Segmentation(seed=index))
        ids = end + torch.arange(count) * -(-blocks[0].numel() // 128)
        end = int(ids[-1]) + -(-blocks[0].numel() // 128)
        store_blocks(Target(arena, ids.int()), blocks)
        pages += ids.tolist()
        if shared is not None:
            store_blocks(Target(arena, torch.tensor([end], dtype=torch.int32)), shared)
            segments.append(end)
            owner += [index] * count
            end += -(-shared.numel() // 128)
            shared = shared.expand(count, -1, -1)
        exact.append(decode(blocks, shared, fmt, torch.float64))
    n = len(pages) * fmt.tokens - 9
    k, v = (torch.cat(x).transpose(0, 1).flatten(1, 2)[:, 5:n] for x in zip(*exact, strict=True))
    q = torch.randn(1, 1, heads * per_head, head_dim, dtype=torch.float64)

    def ids_of(values: list[int]) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.int32)

    shared = {"segments": ids_of(segments), "owner": ids_of(owner)} if segments else {}
    view = View(arena, ids_of(pages), ids_of([5]), ids_of([n]), fmt, 0, heads, **shared)
    o, _ = attend(q, view, 0.1)
    assert relative_error(o[0, 0], exact_attention(q[0, 0], k, v, 0.1)) <= 1e-12
