"""Parts of heads: how a group of ranks hands over to a group of another size.

A worker is a group of ranks, processes of which each has an equal share of the KV heads of every
layer. A group of a ranks hands over to one of b ranks in m = lcm(a, b) parts:

    KV heads            0   1   2   3   4   5   6   7   8   9  10  11
    senders, a = 2    │        rank 0         │        rank 1         │
    parts, m = 6      │   0   │   1   │   2   │   3   │   4   │   5   │
    receivers, b = 3  │    rank 0     │    rank 1     │    rank 2     │

So a part lies on one rank of either side, which exchange it directly. It is a hand-off of its own,
with a manifest, digests, an attachment and a commit, under a plan with 1/m of the heads. Heads are
outermost in a layer page, so a part of it is contiguous on both sides:

    layer page on a sender      │ part 0 │ part 1 │ part 2 │      6 heads, block by block
    layer page on a receiver    │ part 0 │ part 1 │               4 heads

Page ids are the same on all ranks of a group: records have the same size everywhere, and only rank
0 has a pool. So the parts of a prompt have one reservation at rank 0, with one lease, and they are
admitted together or not at all. What each process does is in `disagg/transfer/__init__.py`.

Both groups can have one rank. Then there is one part, which is everything.

The bytes of a head depend on how many ranks computed it: in all layers but the first, sums over
ranks are rounded in another order. So cached blocks are shared only between prompts from groups of
the same size (`sender_model`); attention does not notice such differences.

Arithmetic only: nothing here knows a peer or a codec, and nothing reads a byte.
"""

import math
from dataclasses import dataclass

from disagg.kv.page import Layout
from disagg.kv.plan import LayerGroup, Plan

NONCES = 1 << 64


@dataclass(frozen=True)
class HeadSlice:
    """Where a part lies on a rank: it is the `index`-th of `count` equal slices of its heads."""

    index: int = 0
    count: int = 1

    def offset(self, part: LayerGroup, layout: Layout, layer: int) -> int:
        """Bytes from the start of a record on the rank to the slice of a layer's page.

        part: the layer group, with the heads of the slice
        """
        layer_start = self.count * part.layer_offset(layout, layer)
        return layer_start + self.index * part.layer_bytes(layout)


ALL_HEADS = HeadSlice()


@dataclass(frozen=True)
class Partition:
    """The parts of hand-offs from a group of `senders` ranks to one of `receivers` ranks."""

    senders: int = 1
    receivers: int = 1

    @property
    def count(self) -> int:
        """How many parts there are."""
        return math.lcm(self.senders, self.receivers)

    def sent_by(self, rank: int) -> range:
        """The parts that a rank sends."""
        return _range_of(rank, self.count // self.senders)

    def received_by(self, rank: int) -> range:
        """The parts that a rank receives."""
        return _range_of(rank, self.count // self.receivers)

    def receiver_of(self, part: int) -> int:
        """The rank that receives a part."""
        return part * self.receivers // self.count

    def sent_slice(self, part: int) -> HeadSlice:
        """Where a part lies on the rank that sends it."""
        return _slice_of(part, self.count // self.senders)

    def received_slice(self, part: int) -> HeadSlice:
        """Where a part lies on the rank that receives it."""
        return _slice_of(part, self.count // self.receivers)

    def sent_plan(self, plan: Plan) -> Plan:
        """The plan of a part, from that of a sender; LayoutError where heads do not divide."""
        return plan.divided(self.count // self.senders)

    def received_plan(self, plan: Plan) -> Plan:
        """The plan of a part, from that of a receiver; LayoutError where heads do not divide."""
        return plan.divided(self.count // self.receivers)


def part_nonce(nonce: int, part: int) -> int:
    """The nonce of a part of a reservation, whose own nonce is that of its part 0."""
    return (nonce + part) % NONCES


def part_of(nonce: int, ticket_nonce: int) -> int:
    """The part of a reservation that a ticket names."""
    return (ticket_nonce - nonce) % NONCES


def sender_model(model: str, senders: int) -> str:
    """What the bytes of a prompt depend on besides its plan and tokens: the model, the group.

    model: fingerprint of config and weights
    """
    return model if senders == 1 else f"{model}, computed by {senders} ranks"


def _range_of(rank: int, parts_per_rank: int) -> range:
    first = rank * parts_per_rank
    return range(first, first + parts_per_rank)


def _slice_of(part: int, parts_per_rank: int) -> HeadSlice:
    return HeadSlice(part % parts_per_rank, parts_per_rank)
