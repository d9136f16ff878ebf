"""AlignedKV reads as many bits as a sum can hold, and no more."""

import pytest
import torch
from torch import Tensor

from disagg.codecs import get_codec
from disagg.errors import RequestError
from disagg.kernels.reference.aligned import FEWER_AT, k_drops, v_drops
from disagg.paged.compressed_kv import compress
from tests.codecs.test_golden import encode, golden
from tests.synthetic import exact_attention, gaussian, realistic, relative_error


def levels(drop: Tensor) -> Tensor:
    """Bits that are read when `drop` bits need not be: 16, 12 or 8."""
    bits = torch.full_like(drop, 16, dtype=torch.int32)
    for threshold in FEWER_AT:
        bits -= 4 * (drop >= threshold).int()
    return bits


def truncated(x: Tensor, bits: Tensor) -> Tensor:
    """fp16 x with all but the first `bits` bits replaced by 100...0."""
    words = x.view(torch.int16).int() & 0xFFFF
    missing = 16 - bits
    zeroed = words >> missing << missing
    middle = torch.where(missing > 0, 1 << (missing - 1), 0)
    return (zeroed | middle).short().view(torch.float16)


def first_byte(x: Tensor) -> Tensor:
    """fp16 x as its first 8 bits tell it, in fp32."""
    eight = torch.full(x.shape, 8, dtype=torch.int32)
    return truncated(x, eight).float()


def bits_of_k(queries: Tensor, top: Tensor) -> Tensor:
    """Bits of each channel of K that a query needs: [H, queries, D].

    queries: [H, queries, D], scaled · top: [H, D] - exponent of the largest number of a channel
    """
    columns = queries.float().transpose(1, 2)[None]
    drops = k_drops(columns, top[None, :, :, None])
    return levels(drops)[0].transpose(1, 2)


def bits_of_v(p: Tensor, v: Tensor, top: Tensor) -> Tensor:
    """Bits of each token of V that its weight needs: [H, n, queries].

    p: [H, queries, n] · v: [H, n, D] · top: [H, D] - exponent of the largest number of a channel
    """
    columns = p.float().transpose(1, 2)[None]
    high = first_byte(v)[None]
    drops = v_drops(columns, high, top[None, :, :, None])
    return levels(drops)[0]


def test_the_bits_of_k_are_those_of_the_paper_s_rule() -> None:
    paper = golden("alignedkv_planes")
    top = paper["k_colmax_exp"].int()
    bits = bits_of_k(paper["q"], top)

    assert torch.equal(bits, paper["k_bits"].int())
    assert torch.equal(truncated(paper["k"], bits), paper["k_trunc"])


def test_the_bits_of_v_are_those_of_the_paper_s_rule() -> None:
    paper = golden("alignedkv_planes")
    top = paper["v_colmax_exp"].int()
    bits = bits_of_v(paper["p"], paper["v"], top)

    assert torch.equal(bits, paper["v_bits"].int())
    assert torch.equal(truncated(paper["v"], bits), paper["v_trunc"])


def test_the_planes_are_the_numbers_cut_in_three() -> None:
    paper = golden("alignedkv_planes")
    codec = get_codec("alignedkv")
    k = paper["k"][:, :256]
    v = paper["v"][:, :256]
    encoded = encode(codec, k, v)
    group = codec.layer_group((0,), 4, 128, "float16")
    block = encoded.blocks[0, 2]

    def plane(name: str) -> Tensor:
        layout = group.page.plane(name)
        return block[layout.offset : layout.offset + layout.nbytes]

    high = plane("k_high").view(128, 64)
    expected = paper["k_hi8"][2, :64]
    assert torch.equal(high.T, expected)
    for name, paper_name in (
        ("k_middle", "k_mid4"),
        ("k_low", "k_lo4"),
    ):
        packed = plane(name)
        nibbles = torch.stack([packed & 15, packed >> 4], -1)
        nibbles = nibbles.view(128, 64)
        expected = paper[paper_name][2, :64]
        assert torch.equal(nibbles.T, expected)


def test_pages_of_fp16_are_exact() -> None:
    paper = golden("alignedkv_planes")
    codec = get_codec("alignedkv")
    k = paper["k"][:, :256]
    v = paper["v"][:, :256]
    group = codec.layer_group((0,), 4, 128, "float16")

    encoded = encode(codec, k, v)
    new_k, new_v = codec.decode(encoded, group)
    assert torch.equal(new_k, k.float())
    assert torch.equal(new_v, v.float())


def test_subnormal_values_are_attended_within_the_bound() -> None:
    k, v = realistic(1, 64, 64)
    cache = compress("alignedkv", k, 1e-5 * v)
    q = torch.randn(1, 64)

    new_k, new_v = cache.reconstruct()
    expected = exact_attention(q, new_k, new_v, 0.125)
    o = cache.attend(q)
    assert relative_error(o, expected) <= 2**-8


def test_tokens_of_equal_weight_are_read_as_exactly_as_others() -> None:
    k = torch.zeros(2, 4096, 64)
    v = torch.randn(2, 4096, 64)
    cache = compress("alignedkv", k, v)

    q = torch.ones(2, 64)
    o = cache.attend(q)
    expected = v.half().float().mean(1)
    assert relative_error(o, expected) <= 2e-3


def test_bits_read_needs_a_sealed_page() -> None:
    k, v = realistic(2, 40, 64)
    cache = compress("alignedkv", k, v)

    with pytest.raises(RequestError, match="no page is sealed of 40 tokens"):
        cache.bits_read(torch.zeros(2, 64))


@pytest.mark.parametrize("width", [0, 41])
def test_more_queries_than_tokens_are_refused(width: int) -> None:
    k, v = realistic(2, 40, 64)
    cache = compress("alignedkv", k, v)
    message = f"{width} queries of the last of 40 tokens"

    with pytest.raises(RequestError, match=message):
        cache.attend(torch.zeros(2, width, 64))


def top_exponents(x: Tensor) -> Tensor:
    """Exponent of the largest number of each channel of x [H, n, D] fp16: [H, D]."""
    words = x.abs().amax(1).view(torch.int16)
    return (words >> 10).int()


@pytest.mark.parametrize("per_head", [1, 4])
def test_attention_uses_nothing_but_the_bits_that_it_reports(per_head: int) -> None:
    """Attention computed here from truncated K and V, with the rule of the paper."""
    k, v = realistic(2, 256, 64, dtype=torch.float16)
    q = gaussian(2 * per_head, 64, seed=4)
    cache = compress("alignedkv", k, v)
    bits = cache.bits_read(q)

    # by KV head, scaled
    scaled_q = q / 8
    queries = scaled_q.unflatten(0, (2, per_head))
    k_bits = bits_of_k(queries, top_exponents(k))
    v_tops = top_exponents(v)
    expected = []
    for head in range(2 * per_head):
        kv, i = divmod(head, per_head)
        head_k_bits = k_bits[kv, i].expand(256, -1)
        read_k = truncated(k[kv], head_k_bits)
        scores = read_k.float() @ q[head] / 8
        p = scores.softmax(0)
        v_bits = bits_of_v(p[None, None], v[[kv]], v_tops[[kv]])
        head_v_bits = v_bits[0].expand(-1, 64)
        read_v = truncated(v[kv], head_v_bits)
        expected.append(p @ read_v.float())

        reported_k = bits.k[0, 0, head]
        reported_v = bits.v[0, 0, head]
        mean_k_bits = float(head_k_bits.float().mean())
        mean_v_bits = float(head_v_bits.float().mean())
        assert reported_k == pytest.approx(mean_k_bits)
        assert reported_v == pytest.approx(mean_v_bits, abs=0.05)
    o = cache.attend(q)
    assert relative_error(o, torch.stack(expected)) <= 1e-5
