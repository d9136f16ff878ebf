import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

from disagg.kernels.view import Softmax
from disagg.model import attention
from disagg.model.cache import Workspace
from tests.synthetic import exact_attention

SINKS = torch.linspace(-2, 4, 6)


def naive(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | None
) -> Tensor:
    """Query by query, in double precision."""
    out = torch.empty_like(q, dtype=torch.float64)
    start, group = k.shape[1] - q.shape[1], q.shape[0] // k.shape[0]
    for head in range(q.shape[0]):
        for i in range(q.shape[1]):
            last = start + i + 1
            seen = slice(0 if window is None else max(0, last - window), last)
            keys, values = k[head // group, seen], v[head // group, seen]
            sink = None if softmax.sinks is None else softmax.sinks[head : head + 1]
            how = softmax.scale, None, softmax.cap, sink
            out[head, i] = exact_attention(
                q[[head], i], keys[None], values[None], *how
            )[0]
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 23, 100])
@pytest.mark.parametrize("count", [1, 7, 23])
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize(
    "softmax", [Softmax(0.3), Softmax(0.3, 1.5), Softmax(0.3, 0.0, SINKS)]
)
def test_the_last_tokens_attend_on_what_they_may_see(
    softmax, window, count, heads, monkeypatch
):
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 6 * 23 * 4)  # four queries at a time
    q = torch.randn(6, count, 20)
    k, v = torch.randn(2, heads, 23, 20)
    expected = naive(q, k, v, softmax, window)
    found = attention.attend_exact(q, k, v, softmax, window)
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_later_chunks_make_no_mask_and_repeat_no_heads_where_flash_kernels_serve(
    monkeypatch,
):
    given = {}

    def spy(q, k, v, attn_mask, **options):
        given.update(mask=attn_mask, heads=k.shape[1], **options)
        return q

    monkeypatch.setattr(attention, "can_use_flash_attention", lambda _: True)
    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    q, k = (torch.empty(heads, n, 8, device="meta") for heads, n in ((6, 7), (2, 23)))
    attention.attend_exact(q, k, k, Softmax(0.3), None)
    mask = given["mask"]
    assert (mask.variant, mask.seq_len_q, mask.seq_len_kv) == (
        CausalVariant.LOWER_RIGHT,
        7,
        23,
    )
    assert (given["heads"], given["enable_gqa"], given["is_causal"]) == (2, True, False)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 23])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_gpu_attends_as_well(count, dtype):
    torch.manual_seed(0)
    q = torch.randn(6, count, 64, dtype=dtype)
    k, v = torch.randn(2, 2, 23, 64, dtype=dtype)
    found = attention.attend_exact(q.cuda(), k.cuda(), v.cuda(), Softmax(0.1), None)
    expected = naive(q, k, v, Softmax(0.1), None)
    assert torch.allclose(found.double().cpu(), expected, atol=5e-3)


@pytest.mark.parametrize("rooms", [(), (20, 7)])
def test_a_workspace_gives_back_what_it_has_room_for_and_forgets_finished_layers(rooms):
    k, v = torch.randn(2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    workspace = Workspace(layers=2, heads=3, total=20, head_dim=8, rooms=rooms)
    for before, done in ((0, 4), (4, 6), (6, 10), (10, 17), (17, 18), (18, 20)):
        for layer, room in enumerate(rooms or (20, 20)):
            part, seen = slice(before, done), slice(max(0, done - room), done)
            so_far = workspace.extend(layer, k[:, part], v[:, part], before)
            assert torch.equal(so_far[0], k[:, seen])
            assert torch.equal(so_far[1], v[:, seen])
    assert workspace._layers == [None, None]
