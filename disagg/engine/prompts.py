"""The prompts that an engine computes: their exact K and V, and the records that these become.

    begin   a workspace for exact K and V, filled with the cached prefix
    chunk   the next tokens of a prompt. When a layer has attended, its K and V are
              encoded    into the records of the sequence, which are offered at once
              measured   against the exact ones, if the prompt is a sample
              copied     to raw pages of the prefix cache; states to snapshots
    close   after the step: cache the units that all layers have written, and the snapshots

Knows no queues, and no sequences that decode.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from disagg.codecs.planning import codec_of, parse_plan
from disagg.config import EngineConfig
from disagg.engine.error_probe import CodecErrorProbe
from disagg.engine.exact_prefixes import ExactPrefixes
from disagg.engine.limits import check_range
from disagg.engine.messages import as_disagg_error
from disagg.engine.orders import StepOrders
from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.sequence import Handoff, Sequence
from disagg.engine.state_snapshots import StateSnapshots
from disagg.engine.states import narrow_state
from disagg.errors import CapacityError, PromptTooLongError, RequestError
from disagg.kv.page import RAW_TOKENS, Item, Kind
from disagg.kv.plan import Plan
from disagg.kv.pool import Pool
from disagg.kv.snapshot_borders import snapshot_borders
from disagg.model.attention import Chunk
from disagg.model.capacity import exact_bytes, rooms_of
from disagg.model.runner import Runner
from disagg.model.states.step import PIECE_TOKENS
from disagg.paged.append import RecordIds
from disagg.paged.layer import LayerRecords, PromptChunk, write_prompt
from disagg.paged.page_tables import ChunkTables


class Prompts:
    """The prompts of one engine. On the engine's thread.

    workspace_bytes: room for the exact K and V of all prompts that compute
    probed:          plans whose error is sampled
    on_layer:        called when a layer of a prompt has been computed
    orders:          to the followers of a group; None: there are none
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        pool: Pool,
        arena: Tensor,
        workspace_bytes: int,
        probed: Iterable[Plan],
        on_layer: Callable[[], None],
        orders: StepOrders | None = None,
    ):
        self.prefixes = ExactPrefixes(
            pool, arena, runner.shape, followed=orders is not None
        )
        self._orders = orders
        self._snapshots = _make_snapshots(runner, config, pool, arena)
        self._runner = runner
        self._config = config
        self._arena = arena
        self._workspace_bytes = workspace_bytes
        self._error_probe = CodecErrorProbe(probed)
        self._on_layer = on_layer

    @property
    def most_snapshots(self) -> int | None:
        """How many snapshots of states are cached at most; None: the model has no states."""
        return None if self._snapshots is None else self._snapshots.count

    @property
    def piece_tokens(self) -> int:
        """The tokens of a prompt that are best computed by one step.

        More than one where layers with a state go on at multiples of so many.
        """
        runner = self._runner
        has_room = self._config.max_batch_tokens >= PIECE_TOKENS
        if has_room and runner.has_pieces:
            return PIECE_TOKENS
        return 1

    # -- room

    def check(self, plan: Plan, num_tokens: int) -> None:
        """PromptTooLongError for a prompt whose exact KV never has room here."""
        needed = self._exact_bytes(plan, num_tokens)
        room = self._workspace_bytes
        if needed > room:
            raise PromptTooLongError(
                f"prompt of {num_tokens} tokens needs {needed} bytes of exact KV while it "
                f"prefills; there is room for {room}"
            )

    def has_room(self, sequence: Sequence, active: Iterable[Sequence]) -> bool:
        """Whether the exact KV of a prompt has room now, beside that of active sequences."""
        self.check(sequence.plan, sequence.prompt_len)
        prefilling = [x for x in active if x.workspace is not None]
        needed = sum(
            self._exact_bytes(x.plan, x.prompt_len) for x in (sequence, *prefilling)
        )
        return needed <= self._workspace_bytes

    def _exact_bytes(self, plan: Plan, num_tokens: int) -> int:
        """Bytes of the exact K and V of a prompt while it prefills."""
        rooms = rooms_of(plan, num_tokens, self._config.max_batch_tokens)
        return exact_bytes(self._runner.shape, rooms)

    # -- begin

    def begin(self, sequence: Sequence, budget: int) -> None:
        """Give a prompt a workspace, and fill it with the cached prefix.

        A prompt that takes more than one chunk of `budget` tokens gets all its memory at once.
        """
        rooms = rooms_of(
            sequence.plan, sequence.prompt_len, self._config.max_batch_tokens
        )
        sequence.workspace = self._runner.workspace(sequence.prompt_len, rooms)
        is_reserved = budget < sequence.prompt_len
        try:
            if is_reserved:
                dtype = getattr(torch, self._runner.info.dtype)
                sequence.workspace.reserve(dtype, self._runner.device)
            if self._config.prefix_cache and self.most_snapshots != 0:
                self._restore(sequence)
        except (MemoryError, RuntimeError) as error:
            raise CapacityError(
                "no memory for the exact KV of a prompt of "
                f"{sequence.prompt_len} tokens: {error}"
            ) from None
        if self._orders is not None:
            self._orders.begin_prompt(sequence, rooms, is_reserved)

    def _restore(self, sequence: Sequence) -> None:
        """Begin behind the cached prefix of a prompt.

        Always computed: its last token, the last queries that its codecs need, and all of a prompt
        that is scored.
        """
        queries = [codec_of(x).last_queries for x in sequence.plan.paged]
        least_computed = max(1, *queries)
        limit = 0
        if not sequence.scored:
            limit = max(0, sequence.prompt_len - least_computed)
        if self._snapshots is None:
            sequence.begin(self.prefixes.restore(sequence, limit))
            return
        resume = partial(self._snapshots.restore, sequence)
        sequence.begin(self.prefixes.restore(sequence, limit, resume))
        borders = snapshot_borders(
            tokens=sequence.prompt_len,
            shared=sequence.stored_units * RAW_TOKENS,
            resumed=sequence.cached,
            least_computed=least_computed,
        )
        self._snapshots.plan(sequence, borders)

    # -- compute

    def next_tokens(self, sequence: Sequence, budget: int) -> int:
        """How many tokens of a prompt the coming step computes, of at most `budget`.

        All that are left; else up to the end of a piece, if there is one within the budget.
        """
        end = sequence.n + budget
        if end >= sequence.prompt_len:
            return sequence.prompt_len - sequence.n
        end_of_piece = end - end % self.piece_tokens
        return budget if end_of_piece <= sequence.n else end_of_piece - sequence.n

    def chunk(self, entry: ScheduledTokens, row: int) -> Chunk:
        """A chunk of a prompt, whose layers are encoded and offered as they finish.

        row: of its first token in the batch
        """
        sequence = entry.sequence
        workspace = sequence.workspace
        assert workspace is not None
        units = self.prefixes.open(sequence, sequence.n + entry.count)

        def on_layer(layer: int, k: Tensor, v: Tensor, chunk: Chunk) -> None:
            self._on_layer()
            if sequence.error is not None:
                return
            try:
                start = time.perf_counter()
                encode_chunk(sequence, layer, k, v, chunk, self._arena)
                sequence.encode_s += time.perf_counter() - start
                self._error_probe.measure(sequence, layer, k, v, units.done)
                self.prefixes.write(units, layer, k, v, chunk.tables.prefix_pages)
            except Exception as error:
                sequence.error = as_disagg_error(error)

        paged = sequence.groups[: len(sequence.plan.paged)]
        tables = ChunkTables(
            record_ids=tuple(map(RecordIds.of, paged)),
            prefix_pages=units.tables,
        )
        if self._orders is not None:
            self._orders.add_chunk(
                workspace=workspace,
                row=row,
                count=entry.count,
                before=sequence.n,
                first_unit=units.first,
                tables=tables,
            )
        return Chunk(
            row=row,
            count=entry.count,
            before=sequence.n,
            workspace=workspace,
            on_layer=on_layer,
            tables=tables,
        )

    def cuts(self, entry: ScheduledTokens) -> list[int]:
        """Tokens behind which layers with a state stop in a step: borders, and the last one."""
        end = entry.sequence.n + entry.count
        if entry.decodes or self._snapshots is None:
            return [end]
        borders = self._snapshots.open(entry.sequence, end)
        return sorted({*borders, end})

    def on_state(self, entry: ScheduledTokens, end: int, index: int) -> None:
        """A layer with a state has passed several tokens: copy the state for a snapshot, and
        offer it if it is final.

        end:   tokens of the sequence that it has passed
        index: of the layer among those with a state
        """
        self._on_layer()
        sequence = entry.sequence
        if entry.decodes:
            return
        if self._snapshots is not None:
            self._snapshots.take(sequence, end, index)
        if end != sequence.prompt_len or sequence.error is not None:
            return
        group = sequence.plan.states[index]
        group_index = len(sequence.plan.paged) + index
        (layer,) = group.layers
        try:
            kind = narrow_state(group, sequence.groups[group_index], self._arena)
            if sequence.handoff is not None:
                sequence.handoff.offer([Item(kind, group_index, layer, 0)])
        except Exception as error:
            sequence.error = as_disagg_error(error)

    def check_numbers(self, scheduled: Iterable[ScheduledTokens]) -> None:
        """After a step: note an error for each prompt whose K or V its pages cannot hold.

        Not while layers run: it reads what the device computed.
        """
        for entry in scheduled:
            sequence = entry.sequence
            is_final = sequence.n + entry.count == sequence.prompt_len
            workspace = sequence.workspace
            if not is_final or workspace is None or sequence.error is not None:
                continue
            try:
                check_range(sequence.plan, workspace.largest())
            except RequestError as error:
                sequence.error = error

    def close(self, whole: bool) -> None:
        """After a step: cache its snapshots, and the units that it completed.

        whole: whether the step was completed; else nothing is cached
        """
        if self._snapshots is not None:
            self._snapshots.close(whole)
        self.prefixes.close(whole)


class EncodedPrompt(Protocol):
    """What encoding needs of a prompt."""

    @property
    def plan(self) -> Plan: ...

    @property
    def prompt_len(self) -> int: ...

    @property
    def cached(self) -> int:
        """Leading tokens that were not computed."""

    @property
    def handoff(self) -> Handoff | None: ...


def encode_chunk(
    prompt: EncodedPrompt,
    layer: int,
    k: Tensor,
    v: Tensor,
    chunk: Chunk,
    arena: Tensor,
) -> None:
    """Compress what a chunk completes in one layer, and offer it.

    k, v: [H, n, D] of the last n tokens so far
    """
    index = prompt.plan.group_of[layer]
    group = prompt.plan.groups[index]
    record_ids = chunk.tables.record_ids[index]
    num_pages = len(record_ids.pages)
    # the first chunk also encodes the cached prefix
    is_first = chunk.before == prompt.cached
    tokens = PromptChunk(
        k,
        v,
        total=prompt.prompt_len,
        before=0 if is_first else chunk.before,
        first=chunk.before + chunk.count - k.shape[1],
        queries=chunk.workspace.queries(layer),
        peer_pages=_pages_at_receiver(prompt.handoff, index, layer, num_pages),
    )
    records = LayerRecords(group, layer, arena)
    items = write_prompt(codec_of(group), records, record_ids, tokens)
    if prompt.handoff is not None and items:
        prompt.handoff.offer(
            [
                Item(written.kind, index, layer, i)
                for written in items
                for i in written.indices
            ]
        )


def _make_snapshots(
    runner: Runner, config: EngineConfig, pool: Pool, arena: Tensor
) -> StateSnapshots | None:
    """The snapshots of a model; None where it has no states.

    Models that go on from a state token by token compute whole prompts sooner.
    """
    if not runner.shape.states:
        return None
    plan = parse_plan("raw", runner.shape)
    groups = plan.groups[len(plan.paged) :]
    is_useful = config.prefix_cache and runner.continues_chunks
    share = config.snapshot_share if is_useful else 0.0
    return StateSnapshots(pool, arena, groups, share)


def _pages_at_receiver(
    handoff: Handoff | None, group: int, layer: int, num_pages: int
) -> int:
    """How many leading pages of a layer the receiver has already."""
    if handoff is None:
        return 0
    for i in range(num_pages):
        if not handoff.has(Item(Kind.PAGE, group, layer, i)):
            return i
    return num_pages
