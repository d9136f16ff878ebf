"""The prefix blocks that prompts share on a decode worker, cached under their keys.

    reserve   leading cached blocks        ──► records of the new prompt, with their digests
    commit    verified blocks              ──► cached under their keys
    scrub     blocks with other digests    ──► dropped

Only committed records are cached, and a record that others may own is never written again.
The pool stores and counts; this file knows no peer, no lease and no clock.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from disagg.errors import CapacityError, CorruptFrameError, PromptTooLongError
from disagg.kv.page import ARENA_UNIT, Item, Kind
from disagg.kv.plan import LayerGroup, Plan, RecordShape
from disagg.kv.pool import Pool
from disagg.kv.prefix_keys import PrefixBlock, content_keys, joined, prefix_blocks
from disagg.kv.slabs import num_slabs_for
from disagg.kv.state import GroupState, lay_out
from disagg.transfer.messages import Job
from disagg.transfer.partition import HeadSlice, Partition, sender_model
from disagg.transfer.records import Addresses, Manifest, ReceivedItems, Span
from disagg.wire import digest

Keys = Sequence[Sequence[bytes]]  # of the blocks of a prompt, by layer group


@dataclass(frozen=True)
class CachedBlock:
    """A cached prefix block of a committed prompt: its key and its page ids.

    manifest: of a part of that prompt; the same for all of its parts
    digests:  of all items of all parts, part by part in the order of the manifest
    rank_parts: how many of these are on each rank; all ranks have them at the same addresses
    """

    key: bytes
    pages: tuple[int, ...]
    block: PrefixBlock
    manifest: Manifest
    digests: "array[int]"
    rank_parts: int = 1

    @property
    def group(self) -> LayerGroup:
        """The layer group that the records belong to."""
        return self.manifest.plan.groups[self.block.group]

    def item_digests(self, part: int = 0) -> list[int]:
        """The digests of the block's items of a part, in their order."""
        before = part * self.manifest.num_items
        digests = list[int]()
        for indices in self.manifest.indices_of(self.block):
            digests += self.digests[before + indices.start : before + indices.stop]
        return digests

    def items(self, rank: int = 0) -> Iterator[tuple[Item, Span, int]]:
        """The items on a rank, with their addresses and digests."""
        page_of = dict(zip(self.block.records(), self.pages, strict=True))
        group = self.group
        items = self.block.items(group)
        for index in range(self.rank_parts):
            heads = HeadSlice(index, self.rank_parts)
            digests = self.item_digests(rank * self.rank_parts + index)
            for item, expected in zip(items, digests, strict=True):
                layout = group.layout(item.kind)
                page = page_of[item.kind, item.record]
                start = page * ARENA_UNIT + heads.offset(group, layout, item.layer)
                yield item, (start, group.layer_bytes(layout)), expected


@dataclass(frozen=True)
class PendingHandoff:
    """The records of a reserved job until its commit, and the items that have arrived.

    keys:   of its prefix blocks, by layer group
    parts:  of all ranks; those of followers have only what was cached
    shared: page ids that others may own too
    cached_tokens: leading tokens whose blocks all layer groups had cached, or do not need
    """

    job: Job
    keys: Keys
    groups: tuple[GroupState, ...]
    parts: tuple[ReceivedItems, ...]
    shared: frozenset[int]
    cached_tokens: int

    @property
    def manifest(self) -> Manifest:
        """The items of each part."""
        return self.parts[0].manifest


@dataclass(frozen=True)
class Scrub:
    """Cached blocks that are owned while they are verified. `copies` waits for their bytes."""

    blocks: Sequence[CachedBlock]
    copies: Callable[[], list[memoryview]]

    def spans(self, rank: int = 0) -> list[Span]:
        """The addresses of all items on a rank."""
        return [span for block in self.blocks for _, span, _ in block.items(rank)]

    def verify(self) -> dict[bytes, CorruptFrameError]:
        """By key, the blocks that are not as they were committed. For any thread: it only reads."""
        return self.compare(map(digest, self.copies()))

    def compare(
        self, digests: Iterable[int], rank: int = 0
    ) -> dict[bytes, CorruptFrameError]:
        """The same, from the digests of what is at the addresses of `spans`."""
        damaged: dict[bytes, CorruptFrameError] = {}
        remaining = iter(digests)
        for cached in self.blocks:
            for item, _, expected in cached.items(rank):
                actual = next(remaining)
                if actual != expected:
                    text = (
                        f"{item} was altered in the pool of rank {rank}: "
                        f"it is {actual:x}, was {expected:x}"
                    )
                    damaged.setdefault(cached.key, CorruptFrameError(text))
        return damaged


class PrefixCache:
    """The cached blocks of a decode worker, and records for prompts that may `share` them.

    ranks: of the worker; the pool and the blocks are those of rank 0
    """

    def __init__(self, pool: Pool, share: bool = True, ranks: int = 1):
        self._pool = pool
        self._share = share
        self._ranks = ranks
        self._keys_to_scrub: list[bytes] = []

    def check(self, plan: Plan, tokens: int) -> None:
        """PromptTooLongError for a prompt whose records do not fit into an empty pool.

        Each slab holds records of one shape, so slabs are counted. What others hold now does not
        matter.
        """
        records = plan.records(tokens)
        num_slabs = self._pool.num_slabs
        slab_bytes = self._pool.slab_bytes
        try:
            fits = num_slabs_for(records, slab_bytes) <= num_slabs
        except CapacityError:
            fits = False
        if not fits:
            raise PromptTooLongError(
                f"a prompt of {tokens} tokens is {sum(records.values())} records; "
                f"a pool of {num_slabs} slabs of {slab_bytes} bytes cannot hold them"
            )

    def hold(
        self, model: str, plan: Plan, job: Job, spare_bytes: int
    ) -> PendingHandoff:
        """Take records for a prompt, cached ones where possible; CapacityError takes nothing.

        A sequence that moves shares nothing: pages sealed while decoding are no prompt's.

        spare_bytes: what stays free, unless the pool is empty
        """
        no_keys: Keys = ((),) * len(plan.groups)
        shares = self._share and not job.moved
        is_long = plan.is_long(job.text_length)
        source = sender_model(model, job.senders)
        keys = content_keys(source, plan, job.prompt, is_long) if shares else no_keys
        if self._pool.referenced_pages:
            return self._hold(plan, job, keys, keys, spare_bytes)
        try:
            return self._hold(plan, job, keys, keys, 0)
        except CapacityError:  # the cached blocks lie scattered over too many slabs
            self._pool.evict_all()
            return self._hold(plan, job, keys, no_keys, 0)

    def release(self, groups: Iterable[GroupState]) -> None:
        """Give up all records of a prompt."""
        for state in groups:
            self._pool.release(state.ids())

    def keep(self, pending: PendingHandoff, digests: Sequence[int]) -> frozenset[int]:
        """Cache the verified blocks of a prompt; the page ids of all its blocks.

        digests: of all items of all parts, as in `CachedBlock`

        Blocks are cached from the last to the first, so that the first is evicted last.
        """
        if not any(pending.keys):
            return frozenset()
        plan = pending.manifest.plan
        tokens = pending.job.tokens
        rank_parts = len(self._partition(pending.job).received_by(0))
        manifest = Manifest(plan, tokens)  # a new one, which has not listed its items
        packed_digests = array("Q", digests)
        block_pages = set[int]()
        for blocks, keys, state in zip(
            prefix_blocks(plan, tokens), pending.keys, pending.groups, strict=True
        ):
            ids = state.ids_by_kind()
            for block, key in zip(reversed(blocks), reversed(keys), strict=True):
                pages = tuple(ids[kind][record] for kind, record in block.records())
                cached = CachedBlock(
                    key, pages, block, manifest, packed_digests, rank_parts
                )
                self._pool.keep(key, pages, cached)
                block_pages.update(pages)
        return frozenset(block_pages)

    def begin_scrub(self, max_bytes: int) -> Scrub:
        """Take the next cached blocks, at least one, up to `max_bytes`. End every scrub."""
        if not self._keys_to_scrub:
            self._keys_to_scrub = self._pool.kept_keys(CachedBlock)
        blocks = list[CachedBlock]()
        spans = list[Span]()
        while self._keys_to_scrub and sum(nbytes for _, nbytes in spans) < max_bytes:
            for cached in self._take([self._keys_to_scrub.pop()]):
                blocks.append(cached)
                spans += [span for _, span, _ in cached.items()]
        return Scrub(blocks, self._pool.arena.stage(spans))

    def end_scrub(self, scrub: Scrub, damaged: Iterable[bytes]) -> None:
        """Drop the damaged blocks, and release all blocks of the scrub."""
        for key in damaged:
            self._pool.drop(key)
        for cached in scrub.blocks:
            self._pool.release(cached.pages)

    def _take(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """The cached blocks of the leading keys, which the caller owns too.

        Blocks that an engine caches in the same pool have other keys.
        """
        entries = self._pool.take(keys)
        return [entry.note for entry in entries if isinstance(entry.note, CachedBlock)]

    def _hold(
        self, plan: Plan, job: Job, keys: Keys, reused_keys: Keys, spare_bytes: int
    ) -> PendingHandoff:
        """Take records for a prompt; `reused_keys` of its blocks may come from the cache.

        All other records may hold any bytes: a prompt is admitted when all of its own are there.
        """
        tokens = job.tokens
        partition = self._partition(job)
        cached = [self._take(group_keys) for group_keys in reused_keys]
        shared = [page for blocks in cached for block in blocks for page in block.pages]
        owned = list(shared)
        try:
            groups = self._allocate(plan, tokens, cached, spare_bytes, owned)
            whole = Addresses(Manifest(plan, tokens), groups)
            self._pool.arena.zero(list(whole.unsent()))
            for blocks in cached:
                self._pool.used([block.key for block in blocks])
        except BaseException:
            self._pool.release(owned)
            raise
        manifest = Manifest(partition.received_plan(plan), tokens)
        parts = []
        for part in range(partition.count):
            heads = partition.received_slice(part)
            addresses = Addresses(manifest, groups, heads)
            digests = _cached_items(manifest, cached, part)
            parts.append(ReceivedItems(manifest, addresses, digests))
        return PendingHandoff(
            job=job,
            keys=keys,
            groups=groups,
            parts=tuple(parts),
            shared=frozenset(shared),
            cached_tokens=_cached_tokens(manifest, cached),
        )

    def _partition(self, job: Job) -> Partition:
        return Partition(job.senders, self._ranks)

    def _allocate(
        self,
        plan: Plan,
        tokens: int,
        cached: Sequence[Sequence[CachedBlock]],
        spare_bytes: int,
        owned: list[int],
    ) -> tuple[GroupState, ...]:
        """Records for a prompt, of which some are cached. Adds every new page id to `owned`."""
        pages = [_pages_by_kind(blocks) for blocks in cached]  # by layer group
        missing = []
        for group, group_pages in zip(plan.groups, pages, strict=True):
            for kind, count in group.inventory(tokens).items():
                kind_pages = group_pages[kind]
                shape = group.record(group.layout(kind))
                missing.append((kind_pages, shape, count - len(kind_pages)))
        records = Counter[RecordShape]()
        for _, shape, count in missing:
            records[shape] += count
        self._check_room(spare_bytes, tokens, records)
        for kind_pages, shape, count in missing:
            new_pages = self._pool.claim(shape, count)
            owned += new_pages
            kind_pages += new_pages
        return tuple(
            lay_out(group, tokens, group_pages)
            for group, group_pages in zip(plan.groups, pages, strict=True)
        )

    def _check_room(
        self, spare_bytes: int, tokens: int, records: Mapping[RecordShape, int]
    ) -> None:
        """CapacityError if records do not fit, or leave less than `spare_bytes` free.

        Nothing is evicted yet.
        """
        free_bytes = self._pool.free_bytes
        nbytes = sum(count * shape.nbytes for shape, count in records.items())
        leaves_spare = not spare_bytes or nbytes + spare_bytes <= free_bytes
        if leaves_spare and self._pool.has_room(records):
            return
        raise CapacityError(
            f"{nbytes} bytes needed for {tokens} tokens; of {free_bytes} free ones, in "
            f"slabs of one record size each, {spare_bytes} stay free for sequences that grow"
        )


def _cached_items(
    manifest: Manifest, cached: Sequence[Sequence[CachedBlock]], part: int
) -> dict[int, int]:
    """Digests of the cached items of a part of a prompt, by the prompt's own indices.

    cached: blocks of each layer group
    """
    digests: dict[int, int] = {}
    all_blocks = prefix_blocks(manifest.plan, manifest.tokens)
    for blocks, cached_blocks in zip(all_blocks, cached, strict=True):
        pairs = zip(blocks, cached_blocks, strict=False)
        # blocks of one earlier prompt stand side by side, and are looked up together
        for _, same_prompt in groupby(pairs, key=lambda pair: id(pair[1].digests)):
            own, earlier = zip(*same_prompt, strict=True)
            indices = manifest.indices_of(joined(own))
            earlier_block = replace(
                earlier[0], block=joined([x.block for x in earlier])
            )
            own_indices = chain.from_iterable(indices)
            earlier_digests = earlier_block.item_digests(part)
            digests.update(zip(own_indices, earlier_digests, strict=True))
    return digests


def _cached_tokens(manifest: Manifest, cached: Sequence[Sequence[CachedBlock]]) -> int:
    """Leading tokens of a prompt whose blocks all layer groups have cached, or do not need."""
    plan, tokens = manifest.plan, manifest.tokens
    cached_tokens = tokens
    for group, blocks, cached_blocks in zip(
        plan.groups, prefix_blocks(plan, tokens), cached, strict=True
    ):
        num_cached = min(len(blocks), len(cached_blocks))
        group_tokens = group.dropped(tokens)  # of which no records are needed
        if num_cached:
            group_tokens = blocks[num_cached - 1].end
        cached_tokens = min(cached_tokens, group_tokens)
    return cached_tokens


def _pages_by_kind(blocks: Iterable[CachedBlock]) -> defaultdict[Kind, list[int]]:
    """The pages of cached blocks, in their order."""
    pages = defaultdict[Kind, list[int]](list)
    for cached in blocks:
        for (kind, _), page in zip(cached.block.records(), cached.pages, strict=True):
            pages[kind].append(page)
    return pages
