"""Prompts of random bytes under a small plan that has every kind of record."""

import random
from dataclasses import dataclass

from disagg.page import FinalAt, Kind, make_layout, make_raw_layout
from disagg.plan import LayerGroup, Plan
from disagg.pool import HostArena, Pool
from disagg.state import GroupState, allocate_group
from disagg.transfer.records import ArenaSource, Checklist
from disagg.wire import Commit, Item, PageFrame, Ticket, digest

MODEL = "a-model"
EPOCH = 7


def make_group(layers: tuple[int, ...], heads: int, segments: bool, side: bool) -> LayerGroup:
    """Pages of 64 tokens with odd sizes, and raw pages."""
    page = make_layout("toy", Kind.PAGE, 64, [("k", "uint8", (3, 7)), ("s", "float16", (5,))])
    segment = make_layout("toy", Kind.SEGMENT, 2048, [("b", "float16", (9,))])
    state = make_layout("toy", Kind.SIDE, 0, [("p", "int32", (11,))])
    return LayerGroup(
        layers=layers,
        codec="toy",
        window=None,
        heads=heads,
        head_dim=8,
        residual=60,
        final_at=FinalAt.SEGMENT if segments else FinalAt.PAGE,
        page=page,
        raw=make_raw_layout("float16", 8),
        segment=segment if segments else None,
        side=state if side else None,
    )


PLAN = Plan(
    groups=(make_group((0, 2), 3, True, True), make_group((1,), 1, False, False)),
    group_of=(0, 1, 0),
)
OTHER_PLAN = Plan(groups=(make_group((0, 1, 2), 2, False, False),), group_of=(0, 0, 0))


def make_pool(nbytes: int = 1 << 20, slab_bytes: int = 1 << 14) -> Pool:
    return Pool(HostArena(bytearray(nbytes)), slab_bytes)


@dataclass
class Prompt:
    """The records of a prefill worker, filled with the bytes of a seed."""

    plan: Plan
    tokens: int
    pool: Pool
    states: list[GroupState]
    checklist: Checklist
    read: ArenaSource

    def bytes_of(self, item: Item) -> memoryview:
        (data,) = self.read.read([item])
        return data

    def frame(self, ticket: Ticket, items: list[Item]) -> PageFrame:
        """A frame of items that share kind and group."""
        kind, group = items[0][:2]
        return PageFrame(
            ticket=ticket,
            kind=kind,
            group=group,
            layout=self.plan.groups[group].layout(kind).fingerprint,
            layers=tuple(item.layer for item in items),
            records=tuple(item.record for item in items),
            digests=tuple(digest(self.bytes_of(item)) for item in items),
            payload=tuple(self.bytes_of(item) for item in items),
        )

    def frames(self, ticket: Ticket) -> list[PageFrame]:
        """Everything, one frame for each layer, kind and group."""
        return [
            self.frame(ticket, [x for x in self.checklist.items if x[:3] == key])
            for key in dict.fromkeys(item[:3] for item in self.checklist.items)
        ]

    def commit(self, first_token: int = 5) -> Commit:
        digests = tuple(digest(self.bytes_of(item)) for item in self.checklist.items)
        return Commit(self.tokens, self.plan.fingerprint, digests, first_token, {"ids": [1, 2]})


def make_prompt(tokens: int, seed: int = 0, plan: Plan = PLAN) -> Prompt:
    pool = make_pool(1 << 23, 1 << 19)
    states = [allocate_group(group, tokens, pool) for group in plan.groups]
    checklist = Checklist(plan, tokens)
    read = ArenaSource(pool.arena, checklist, states)
    source = random.Random(seed)
    for item in checklist.items:
        view = read(item)
        view[:] = source.randbytes(view.nbytes)
    return Prompt(plan, tokens, pool, states, checklist, read)
