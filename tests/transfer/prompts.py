"""Prompts of random bytes under a small plan that has every kind of record."""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from disagg.kv.arena import Arena, Copies, HostArena
from disagg.kv.page import ARENA_UNIT, FinalAt, Item, Kind, make_layout, make_raw_layout
from disagg.kv.plan import LayerGroup, Plan
from disagg.kv.pool import Pool
from disagg.kv.prefix_keys import PrefixBlock, prefix_blocks
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
    side_record = make_layout("toy", Kind.SIDE, 0, [("p", "int32", (11,))])
    return LayerGroup(
        layers,
        "toy",
        None,
        heads,
        8,
        60,
        FinalAt.SEGMENT if segments else FinalAt.PAGE,
        page,
        make_raw_layout("float16", 8),
        segment if segments else None,
        side_record if side else None,
    )


GROUPS = (
    make_group((0, 2), heads=3, segments=True, side=True),
    make_group((1,), heads=1, segments=False, side=False),
)
PLAN = Plan(groups=GROUPS, group_of=(0, 1, 0))
OTHER_PLAN = Plan(
    groups=(make_group((0, 1, 2), heads=2, segments=False, side=False),),
    group_of=(0, 0, 0),
)
BY_PAGE = Plan(
    groups=(make_group((0,), heads=1, segments=False, side=False),),
    group_of=(0,),
)
BY_PROMPT = Plan(
    groups=(
        replace(
            make_group((0,), heads=2, segments=True, side=True),
            final_at=FinalAt.PROMPT,
        ),
    ),
    group_of=(0,),
)


class SlowArena(HostArena):
    """A host that is read slowly, as a device is.

    waited: names of the threads that waited for bytes
    """

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


def make_policy(plan: Plan = PLAN, **changes: object) -> ReceiverPolicy:
    return replace(ReceiverPolicy(MODEL, lambda spec: plan, EPOCH), **changes)


@dataclass
class Prompt:
    """Token ids, and the records of a prefill worker, filled with the bytes of a seed."""

    plan: Plan
    ids: tuple[int, ...]
    pool: Pool
    states: list[GroupState]
    manifest: Manifest
    source: ArenaSource

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def job(self, rid: str = "r", attempt: int = 0, **changes: object) -> Job:
        return replace(Job(rid, attempt, self.ids), **changes)

    def bytes_of(self, item: Item) -> memoryview:
        (data,) = self.source.read([item])
        return data

    def digests(self) -> dict[int, int]:
        """Of all items, by their indices."""
        return {
            index: digest(self.bytes_of(item))
            for index, item in enumerate(self.manifest.items)
        }

    def frame(self, ticket: Ticket, items: Sequence[Item]) -> PageFrame:
        payload = tuple(self.source.read(items))
        return PageFrame(
            ticket=ticket,
            indices=tuple(map(self.manifest.index_of, items)),
            digests=tuple(map(digest, payload)),
            payload=payload,
        )

    def frames(self, ticket: Ticket) -> list[PageFrame]:
        """Everything, one frame for each layer and kind."""
        runs = self.manifest.runs.values()
        return [self.frame(ticket, list(map(self.manifest.item, run))) for run in runs]

    def items_of(self, frame: PageFrame) -> list[Item]:
        """The items of a frame; checks that its bytes have their digests."""
        assert tuple(map(digest, frame.payload)) == frame.digests
        return list(map(self.manifest.item, frame.indices))

    def commit(self, ticket: Ticket = Ticket(0, 0, 0), first_token: int = 5) -> Commit:
        return Commit(
            ticket=ticket,
            tokens=self.tokens,
            plan=self.plan.fingerprint,
            digests=tuple(self.digests().values()),
            first_token=first_token,
            extras={"ids": [1, 2]},
        )

    def equals(self, arena: Arena, states: Sequence[GroupState]) -> bool:
        """Whether the records of a receiver hold the same bytes, those that were not sent too."""
        for index, group in enumerate(self.plan.groups):
            own_ids = self.states[index].ids_by_kind()
            received_ids = states[index].ids_by_kind()
            for kind, pages in own_ids.items():
                nbytes = len(group.layers) * group.layer_bytes(group.layout(kind))
                for own, received in zip(pages, received_ids[kind], strict=True):
                    own_bytes = self.pool.arena.read(own * ARENA_UNIT, nbytes)
                    if own_bytes != arena.read(received * ARENA_UNIT, nbytes):
                        return False
        return True


def fill(prompt: Prompt, item: Item, seed: object) -> None:
    """Other bytes for an item of a prefill worker."""
    source = random.Random(str(seed))
    spans = Addresses(prompt.manifest, prompt.states).spans(item)
    pieces = [(start, source.randbytes(nbytes)) for start, nbytes in spans]
    prompt.pool.arena.write(pieces)


def make_prompt(
    tokens: int, seed: int = 0, plan: Plan = PLAN, ids: Sequence[int] | None = None
) -> Prompt:
    pool = make_pool(1 << 23, 1 << 19)
    states = [allocate_group(group, tokens, pool) for group in plan.groups]
    manifest = Manifest(plan, tokens)
    prompt = Prompt(
        plan=plan,
        ids=tuple(ids or [seed + 2] * tokens),
        pool=pool,
        states=states,
        manifest=manifest,
        source=ArenaSource(pool.arena, manifest, states),
    )
    for item in manifest.items:
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
    if noise is None:
        for block in _shared_blocks(plan, tokens, shared):
            for item in block.items(plan.groups[block.group]):
                fill(prompt, item, item)
    return prompt


def shared_bytes(manifest: Manifest, shared: int) -> int:
    """Bytes of the records that lie completely in the first `shared` tokens."""
    plan = manifest.plan
    nbytes = 0
    for block in _shared_blocks(plan, manifest.tokens, shared):
        items = block.items(plan.groups[block.group])
        nbytes += sum(map(manifest.nbytes, items))
    return nbytes


def _shared_blocks(plan: Plan, tokens: int, shared: int) -> list[PrefixBlock]:
    blocks = chain.from_iterable(prefix_blocks(plan, tokens))
    return [block for block in blocks if block.end <= shared]
