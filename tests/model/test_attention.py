from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

from disagg.kernels.view import Softmax
from disagg.kv.plan import LayerShape
from disagg.model import attention
from disagg.model.cache import Workspace
from tests.synthetic import exact_attention

SINKS = torch.linspace(-2, 4, 6)


def naive(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None
) -> Tensor:
    """Query by query, in double precision."""
    out = torch.empty_like(q, dtype=torch.float64)
    before = k.shape[1] - q.shape[1]
    query_heads = q.shape[0] // k.shape[0]  # of one KV head
    for head in range(q.shape[0]):
        sink = None if softmax.sinks is None else softmax.sinks[head : head + 1]
        for i in range(q.shape[1]):
            end = before + i + 1
            start = 0 if window is None else max(0, end - window)
            (out[head, i],) = exact_attention(
                q[[head], i],
                k[head // query_heads, start:end][None],
                v[head // query_heads, start:end][None],
                softmax.scale,
                None,
                softmax.cap,
                sink,
            )
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 23, 100])
@pytest.mark.parametrize("count", [1, 7, 23])
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize(
    "softmax",
    [
        Softmax(0.3),
        Softmax(0.3, 1.5),
        Softmax(0.3, 0.0, SINKS),
    ],
)
def test_the_last_tokens_attend_to_all_visible_ones(
    softmax, window, count, heads, monkeypatch
):
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 6 * 23 * 4)  # four queries at a time
    q = torch.randn(6, count, 20)
    k, v = torch.randn(2, heads, 23, 20)

    out = attention.attend_exact(q, k, v, softmax, window)

    expected = naive(q, k, v, softmax, window)
    assert torch.allclose(out.double(), expected, atol=1e-5)


BORDERS = (7, 64, 100, 101, 128, 190)


@pytest.mark.parametrize("heads", [2, 6])
def test_a_query_has_the_same_bits_in_every_chunk(heads):
    torch.manual_seed(0)
    q = torch.randn(6, 200, 64)
    k, v = torch.randn(2, heads, 200, 64)
    softmax = Softmax(0.2)

    whole = attention.attend_exact(q, k, v, softmax, None)

    for start, end in pairwise((0, *BORDERS, 200)):
        visible = k[:, :end], v[:, :end]
        chunk = attention.attend_exact(q[:, start:end], *visible, softmax, None)
        assert torch.equal(chunk, whole[:, start:end])


NEAR_BORDERS = (0, 56, 84, 117, 300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 112])
def test_torch_gives_a_query_the_same_bits_in_every_chunk(dtype, head_dim, monkeypatch):
    monkeypatch.setattr(attention.cpu_exact, "is_served", lambda *_: False)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 8, 300, head_dim).to(dtype)
    softmax = Softmax(0.2)

    whole = attention.attend_exact(q, k, v, softmax, None)

    for start, end in pairwise(NEAR_BORDERS):
        visible = k[:, :end], v[:, :end]
        chunk = attention.attend_exact(q[:, start:end], *visible, softmax, None)
        assert torch.equal(chunk, whole[:, start:end])


def test_calls_of_torch_in_bfloat16_have_the_same_sizes_in_every_chunk(monkeypatch):
    flash = attention.FLASH
    sizes = set()

    def record(q, k, v, **options):
        sizes.add((tuple(q.shape), tuple(k.shape)))
        return flash(q, k, v, **options)

    monkeypatch.setattr(attention.cpu_exact, "is_served", lambda *_: False)
    monkeypatch.setattr(attention, "FLASH", record)
    q, k, v = torch.randn(3, 2, 300, 32).bfloat16()
    softmax = Softmax(0.2)
    attention.attend_exact(q, k, v, softmax, None)
    of_whole = sizes.copy()

    for start, end in pairwise(NEAR_BORDERS):
        visible = k[:, :end], v[:, :end]
        attention.attend_exact(q[:, start:end], *visible, softmax, None)

    assert sizes == of_whole


def test_flash_kernels_get_neither_a_mask_nor_repeated_heads(monkeypatch):
    arguments = {}

    def spy(q, k, v, attn_mask, **options):
        arguments.update(mask=attn_mask, heads=k.shape[1], **options)
        return q

    monkeypatch.setattr(attention, "can_use_flash_attention", lambda _: True)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    q = torch.empty(6, 7, 8, device="meta")
    k = torch.empty(2, 23, 8, device="meta")

    attention.attend_exact(q, k, k, Softmax(0.3), None)

    mask = arguments["mask"]
    assert mask.variant == CausalVariant.LOWER_RIGHT
    assert (mask.seq_len_q, mask.seq_len_kv) == (7, 23)
    assert arguments["heads"] == 2
    assert arguments["enable_gqa"] is True
    assert arguments["is_causal"] is False


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 23])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_gpu_attends_as_well(count, dtype):
    torch.manual_seed(0)
    q = torch.randn(6, count, 64, dtype=dtype)
    k, v = torch.randn(2, 2, 23, 64, dtype=dtype)

    out = attention.attend_exact(q.cuda(), k.cuda(), v.cuda(), Softmax(0.1), None)

    expected = naive(q, k, v, Softmax(0.1), None)
    assert torch.allclose(out.double().cpu(), expected, atol=5e-3)


@pytest.mark.parametrize("rooms", [(), (20, 7)])
def test_a_workspace_returns_memory_and_frees_finished_layers(rooms):
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 3, 20, 8, generator=generator)
    workspace = Workspace([LayerShape(3, 8)] * 2, total=20, rooms=rooms)
    chunks = [
        (0, 4),
        (4, 6),
        (6, 10),
        (10, 17),
        (17, 18),
        (18, 20),
    ]

    for before, done in chunks:
        for layer, room in enumerate(rooms or (20, 20)):
            first = max(0, done - room)
            all_k, all_v = workspace.extend(
                layer, k[:, before:done], v[:, before:done], before
            )
            assert torch.equal(all_k, k[:, first:done])
            assert torch.equal(all_v, v[:, first:done])

    assert workspace._layers == [None, None]
