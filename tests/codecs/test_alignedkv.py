"""AlignedKV reads as many bits as a sum can hold, and no more."""

import pytest
import torch

from disagg.codecs import get_codec
from disagg.errors import RequestError
from disagg.kernels.reference.aligned import FEWER_AT, k_drops, v_drops
from disagg.paged.compressed_kv import compress
from tests.codecs.test_golden import encode, golden
from tests.synthetic import exact_attention, realistic, relative_error


def levels(drop: torch.Tensor) -> torch.Tensor:
    """16, 12 or 8."""
    return 16 - 4 * (drop >= FEWER_AT[0]).int() - 4 * (drop >= FEWER_AT[1]).int()


def truncated(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp16 x with all but the first `bits` bits replaced by 100...0."""
    words = x.view(torch.int16).int() & 0xFFFF
    missing = 16 - bits
    cut = (words >> missing << missing) | torch.where(
        missing > 0, 1 << (missing - 1), 0
    )
    return cut.short().view(torch.float16)


def test_the_bits_of_k_and_v_are_those_of_the_paper_s_rule() -> None:
    found = golden("alignedkv_planes")
    q, k, v, p = (found[name] for name in ("q", "k", "v", "p"))
    k_top, v_top = (found[f"{x}_colmax_exp"].int()[None, :, :, None] for x in "kv")
    k_bits = levels(k_drops(q.float().transpose(1, 2)[None], k_top))[0].transpose(1, 2)
    assert torch.equal(k_bits, found["k_bits"].int())
    high = truncated(v, torch.full_like(found["v_bits"], 8).int()).float()
    v_bits = levels(v_drops(p.float().transpose(1, 2)[None], high[None], v_top))[0]
    assert torch.equal(v_bits, found["v_bits"].int())
    assert torch.equal(truncated(k, k_bits), found["k_trunc"])
    assert torch.equal(truncated(v, v_bits), found["v_trunc"])


def test_the_planes_are_the_numbers_cut_in_three() -> None:
    found = golden("alignedkv_planes")
    codec = get_codec("alignedkv")
    k, v = found["k"][:, :256], found["v"][:, :256]
    encoded, group = encode(codec, k, v), codec.layer_group((0,), 4, 128, "float16")
    high, middle, low = (
        encoded.blocks[0, 2, group.page.plane(name).offset :][
            : group.page.plane(name).nbytes
        ]
        for name in ("k_high", "k_middle", "k_low")
    )
    assert torch.equal(high.view(128, 64).T, found["k_hi8"][2, :64])
    for plane, name in ((middle, "k_mid4"), (low, "k_lo4")):
        nibbles = torch.stack([plane & 15, plane >> 4], -1).view(128, 64)
        assert torch.equal(nibbles.T, found[name][2, :64])
    seen_k, seen_v = codec.decode(encoded, group)
    assert torch.equal(seen_k, k.float())
    assert torch.equal(seen_v, v.float())


def test_values_below_the_normal_numbers_of_fp16_are_attended_within_the_bound() -> (
    None
):
    k, v = realistic(1, 64, 64)
    pages, q = compress(get_codec("alignedkv"), k, 1e-5 * v), torch.randn(1, 64)
    expected = exact_attention(q, *pages.reconstruct(), 0.125)
    assert relative_error(pages.attend(q), expected) <= 2**-8


def test_tokens_that_weigh_the_same_are_read_as_exactly_as_others() -> None:
    k, v = torch.zeros(2, 4096, 64), torch.randn(2, 4096, 64)
    cache, q = compress(get_codec("alignedkv"), k, v), torch.ones(2, 64)
    assert relative_error(cache.attend(q), v.half().float().mean(1)) <= 2e-3


def test_what_cannot_be_asked_of_a_cache_is_refused() -> None:
    k, v = realistic(2, 40, 64)
    cache = compress(get_codec("alignedkv"), k, v)
    with pytest.raises(RequestError, match="no page is sealed of 40 tokens"):
        cache.bits_read(torch.zeros(2, 64))
    for width in (0, 41):
        with pytest.raises(
            RequestError, match=f"{width} queries of the last of 40 tokens"
        ):
            cache.attend(torch.zeros(2, width, 64))


@pytest.mark.parametrize("per_head", [1, 4])
def test_attention_uses_nothing_but_the_bits_that_it_reports(per_head: int) -> None:
    k, v = (x.half() for x in realistic(2, 256, 64))
    q = torch.randn(2 * per_head, 64, generator=torch.Generator().manual_seed(4))
    codec = get_codec("alignedkv")
    cache = compress(codec, k, v)
    bits = cache.bits_read(q)
    expected = []
    for head in range(2 * per_head):
        row, kv = q[head, :, None][None, None] / 8, head // per_head
        top_k, top_v = (
            (x[kv].abs().amax(0).view(torch.int16) >> 10).int() for x in (k, v)
        )
        k_bits = levels(k_drops(row, top_k[None, None, :, None]))[0, 0, :, 0]
        seen_k = truncated(k[kv], k_bits.expand(256, -1)).float()
        p = (seen_k @ q[head] / 8).softmax(0)
        high = truncated(v[kv], torch.tensor(8).expand(256, 64)).float()
        drops = v_drops(
            p[None, None, :, None], high[None, None], top_v[None, None, :, None]
        )
        v_bits = levels(drops)
        seen_v = truncated(v[kv], v_bits[0, 0].expand(-1, 64)).float()
        expected.append(p @ seen_v)
        assert bits.k[0, 0, head] == pytest.approx(float(k_bits.float().mean()))
        assert bits.v[0, 0, head] == pytest.approx(
            float(v_bits.float().mean()), abs=0.05
        )
    assert relative_error(cache.attend(q), torch.stack(expected)) <= 1e-5
