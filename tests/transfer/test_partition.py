"""The arithmetic of parts: which rank sends what to which rank, and where it lies there."""

from itertools import chain
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.codecs.planning import KVShape, parse_plan
from disagg.errors import LayoutError
from disagg.kv.page import Kind, make_state_layout
from disagg.kv.plan import LayerShape, Plan
from disagg.transfer.partition import HeadSlice, Partition, part_nonce, part_of

RANKS = st.integers(1, 12)


def make_plan(heads: int, **shape: object) -> Plan:
    full = LayerShape(heads, 64)
    windowed = LayerShape(2 * heads, 32, window=100)
    layers = (full, windowed)
    return parse_plan("raw", KVShape(layers, "float16", **shape))


@given(senders=RANKS, receivers=RANKS)
def test_each_part_leaves_one_rank_and_arrives_at_one(senders, receivers):
    parts = Partition(senders, receivers)

    everything = list(range(lcm(senders, receivers)))
    sent = chain.from_iterable(map(parts.sent_by, range(senders)))
    received = chain.from_iterable(map(parts.received_by, range(receivers)))
    assert list(sent) == everything
    assert list(received) == everything
    for rank in range(receivers):
        ranks = set(map(parts.receiver_of, parts.received_by(rank)))
        assert ranks == {rank}


def first_head(rank: int, ranks: int, heads: HeadSlice) -> float:
    """The first head of a slice of a rank, of 1 in all."""
    before = rank + heads.index / heads.count
    return before / ranks


@given(senders=RANKS, receivers=RANKS)
def test_a_part_is_the_same_heads_on_both_sides(senders, receivers):
    parts = Partition(senders, receivers)

    for sender in range(senders):
        for part in parts.sent_by(sender):
            receiver = parts.receiver_of(part)
            sent = first_head(sender, senders, parts.sent_slice(part))
            received = first_head(receiver, receivers, parts.received_slice(part))
            assert sent == pytest.approx(part / parts.count)
            assert received == pytest.approx(part / parts.count)


@given(senders=st.sampled_from([1, 2, 4]), receivers=st.sampled_from([1, 2, 4]))
def test_both_sides_derive_one_plan_of_a_part(senders, receivers):
    whole = make_plan(heads=8)
    parts = Partition(senders, receivers)

    sent = parts.sent_plan(whole.divided(senders))
    received = parts.received_plan(whole.divided(receivers))
    assert sent.fingerprint == received.fingerprint
    assert sent.of_group(parts.count).fingerprint == whole.fingerprint


def test_one_part_is_the_plan_itself():
    plan = make_plan(heads=3)
    assert Partition().received_plan(plan) is plan


def test_heads_that_do_not_divide_are_refused_with_their_layer():
    with pytest.raises(LayoutError, match=r"layer 0 has 3 KV heads.* among 2 ranks"):
        make_plan(heads=3).divided(2)


def test_latents_and_states_are_refused_where_they_would_be_divided():
    layer = LayerShape(1, 96, latent=64)
    latent = KVShape((layer,), "float16")
    with pytest.raises(LayoutError, match="one latent for all heads"):
        parse_plan("raw", latent).divided(2)

    plane = ("conv0", "float32", (4, 4))
    state = make_state_layout([plane])
    with pytest.raises(LayoutError, match="layer 2 keeps a state"):
        make_plan(heads=2, states=(state,)).divided(2)


@given(nonce=st.integers(0, 2**64 - 1), part=st.integers(0, 143))
def test_the_nonce_of_a_part_names_it(nonce, part):
    ticket_nonce = part_nonce(nonce, part)
    assert 0 <= ticket_nonce < 2**64
    assert part_of(nonce, ticket_nonce) == part
    assert part_nonce(nonce, 0) == nonce


def test_every_kind_of_a_divided_record_has_its_share_of_bytes():
    whole = parse_plan("gear", KVShape.uniform(2, 4, 64, "float16"))
    part = whole.divided(2)
    for kind in (Kind.PAGE, Kind.SEGMENT, Kind.RAW):
        (group,) = whole.groups
        (half,) = part.groups
        layout = group.layout(kind)
        assert half.layout(kind) == layout
        assert 2 * half.layer_bytes(layout) == group.layer_bytes(layout)
