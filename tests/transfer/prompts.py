"""Prompts of random bytes under a small plan that has every kind of record."""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from disagg.kv.arena import Arena, Copies, HostArena
from disagg.kv.page import ARENA_UNIT, FinalAt, Item, Kind, make_layout, make_raw_layout
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.pool import Pool
from disagg.kv.prefix_keys import units_of
from disagg.kv.state import GroupState, allocate_group
from disagg.transfer.messages import Job
from disagg.transfer.records import Addresses, ArenaSource, Manifest
from disagg.transfer.reservations import ReceiverPolicy
from disagg.wire import Commit, PageFrame, Ticket, digest

MODEL = "a-model"
EPOCH = 7


def make_group(
    layers: tuple[int, ...], heads: int, segments: bool, side: bool
) -> LayerGroup:
    """Pages of 64 tokens with odd sizes, and raw pages."""
    page = make_layout(
        "toy", Kind.PAGE, 64, [("k", "uint8", (3, 7)), ("s", "float16", (5,))]
    )
    segment = make_layout("toy", Kind.SEGMENT, 2048, [("b", "float16", (9,))])
    state = make_layout("toy", Kind.SIDE, 0, [("p", "int32", (11,))])
    final_at, raw = (
        FinalAt.SEGMENT if segments else FinalAt.PAGE,
        make_raw_layout("float16", 8),
    )
    shared = segment if segments else None, state if side else None
    return LayerGroup(layers, "toy", None, heads, 8, 60, final_at, page, raw, *shared)


GROUPS = make_group((0, 2), 3, True, True), make_group((1,), 1, False, False)
PLAN = Plan(groups=GROUPS, group_of=(0, 1, 0))
OTHER_PLAN = Plan(groups=(make_group((0, 1, 2), 2, False, False),), group_of=(0, 0, 0))
BY_PAGE = Plan((make_group((0,), 1, False, False),), (0,))
BY_PROMPT = Plan(
    (replace(make_group((0,), 2, True, True), final_at=FinalAt.PROMPT),), (0,)
)


class SlowArena(HostArena):
    """A host that is slow to read, as a device is. `waited`: the threads that waited for bytes."""

    on_host = False

    def __init__(self, buffer: bytearray | memoryview):
        super().__init__(buffer)
        self.waited: list[str] = []

    def stage(self, spans: Sequence[tuple[int, int]], fresh: bool = False) -> Copies:
        copies = [bytes(self.read(*span)) for span in spans]

        def wait() -> list[memoryview]:
            self.waited.append(threading.current_thread().name)
            return list(map(memoryview, copies))

        return wait


def make_pool(nbytes: int = 1 << 20, slab_bytes: int = 1 << 14) -> Pool:
    return Pool(HostArena(bytearray(nbytes)), slab_bytes)


def make_terms(plan: Plan = PLAN, **changes: object) -> ReceiverPolicy:
    return replace(ReceiverPolicy(MODEL, lambda spec: plan, EPOCH), **changes)


@dataclass
class Prompt:
    """Token ids, and the records of a prefill worker, filled with the bytes of a seed."""

    plan: Plan
    ids: tuple[int, ...]
    pool: Pool
    states: list[GroupState]
    checklist: Manifest
    read: ArenaSource

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def job(self, rid: str = "r", attempt: int = 0, **changes: object) -> Job:
        return replace(Job(rid, attempt, self.ids), **changes)

    def bytes_of(self, item: Item) -> memoryview:
        (data,) = self.read.read([item])
        return data

    def digests(self) -> dict[int, int]:
        """Of all items, by their places."""
        return {
            i: digest(self.bytes_of(item))
            for i, item in enumerate(self.checklist.items)
        }

    def frame(self, ticket: Ticket, items: Sequence[Item]) -> PageFrame:
        payload = tuple(self.read.read(items))
        places = tuple(map(self.checklist.place, items))
        return PageFrame(ticket, places, tuple(map(digest, payload)), payload)

    def frames(self, ticket: Ticket) -> list[PageFrame]:
        """Everything, one frame for each layer and kind."""
        runs = self.checklist.runs.values()
        return [self.frame(ticket, list(map(self.checklist.item, run))) for run in runs]

    def items_of(self, frame: PageFrame) -> list[Item]:
        """What a frame carries; its bytes have their digests."""
        assert tuple(map(digest, frame.payload)) == frame.digests
        return list(map(self.checklist.item, frame.places))

    def commit(self, ticket: Ticket = Ticket(0, 0, 0), first_token: int = 5) -> Commit:
        digests, plan = tuple(self.digests().values()), self.plan.fingerprint
        return Commit(ticket, self.tokens, plan, digests, first_token, {"ids": [1, 2]})

    def equals(self, arena: Arena, states: Sequence[GroupState]) -> bool:
        """Whether the records of a receiver hold the same bytes, those that were not sent too."""
        there, here = (
            [x.ids_by_kind() for x in some] for some in (states, self.states)
        )
        for index, group in enumerate(self.plan.groups):
            for kind, pages in here[index].items():
                size = len(group.layers) * group.layer_bytes(group.layout(kind))
                for ours, theirs in zip(pages, there[index][kind], strict=True):
                    mine = self.pool.arena.read(ours * ARENA_UNIT, size)
                    if mine != arena.read(theirs * ARENA_UNIT, size):
                        return False
        return True


def fill(prompt: Prompt, item: Item, seed: object) -> None:
    """Other bytes for an item of a prefill worker."""
    source = random.Random(str(seed))
    spans = Addresses(prompt.checklist, prompt.states).spans(item)
    prompt.pool.arena.write(
        [(start, source.randbytes(nbytes)) for start, nbytes in spans]
    )


def make_prompt(
    tokens: int, seed: int = 0, plan: Plan = PLAN, ids: Sequence[int] | None = None
) -> Prompt:
    pool = make_pool(1 << 23, 1 << 19)
    states = [allocate_group(group, tokens, pool) for group in plan.groups]
    checklist = Manifest(plan, tokens)
    read = ArenaSource(pool.arena, checklist, states)
    prompt = Prompt(
        plan, tuple(ids or [seed + 2] * tokens), pool, states, checklist, read
    )
    for item in checklist.items:
        fill(prompt, item, (seed, item))
    return prompt


def make_related(
    tokens: int, seed: int, shared: int, plan: Plan = PLAN, noise: int | None = None
) -> Prompt:
    """A prompt whose first `shared` tokens, and their records, are those of all such prompts.

    noise: another computation of the same prompt, whose bytes are a little different
    """
    ids = [1] * shared + [seed + 2] * (tokens - shared)
    prompt = make_prompt(tokens, seed if noise is None else noise, plan, ids)
    for unit in [unit for units in units_of(plan, tokens) for unit in units]:
        if unit.end <= shared and noise is None:
            for item in unit.items(plan.groups[unit.group]):
                fill(prompt, item, item)
    return prompt


def shared_bytes(checklist: Manifest, shared: int) -> int:
    """Bytes of the records that lie wholly in so many first tokens."""
    plan = checklist.plan
    units = [unit for units in units_of(plan, checklist.tokens) for unit in units]
    known = [unit for unit in units if unit.end <= shared]
    items = [item for unit in known for item in unit.items(plan.groups[unit.group])]
    return sum(map(checklist.nbytes, items))
