"""The engine: the one thread that runs the model. Its loop can be recited:

    drain inbox  →  schedule  →  forward (layers: encode, offer)  →  sample  →  one StepOutput

It blocks on an empty inbox and on its own kernels, and on nothing else: never on a peer, a socket
or a credit. Whatever goes wrong with one request ends that request: its pages are freed, and its
`Failed` says why. Where nobody can tell whose fault it was, all of the step end; the engine lives.
"""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import lru_cache
from itertools import count, takewhile
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from disagg.codecs.planning import KVShape, codec_of, parse_plan
from disagg.config import EngineConfig
from disagg.engine.arena import (
    make_pool,
    measure_memory,
    slab_bytes_for,
    wait_for_kernels,
)
from disagg.engine.guard import CodecErrorProbe, relative_errors
from disagg.engine.messages import (
    Abort,
    Admit,
    EngineLoad,
    Failed,
    Message,
    Move,
    Moved,
    Prefill,
    Prefilled,
    StepOutput,
    Token,
    is_memory_error,
    named,
)
from disagg.engine.prefixes import ExactPrefixes
from disagg.engine.sampler import Sampled, choose, score_prompts
from disagg.engine.scheduler import ScheduledTokens, Scheduler
from disagg.engine.sequence import Sequence, Status
from disagg.engine.steps import StepAllocation, build_batch, take_stash
from disagg.errors import (
    CapacityError,
    DisaggError,
    PeerLostError,
    PromptTooLongError,
    RequestError,
    TransferError,
    UnknownNameError,
)
from disagg.kv.decode_slots import DecodeSlots
from disagg.kv.page import Item, Kind
from disagg.kv.plan import Plan
from disagg.model.attention import Chunk
from disagg.model.capacity import exact_bytes, rooms_of
from disagg.model.runner import Runner
from disagg.paged.append import RecordIds
from disagg.paged.layer import LayerRecords, PromptChunk, write_prompt

WAIT_S = 0.05  # how often a sequence without room looks again


class Engine:
    """Prefills and decodes; what it does with a request is a matter of the messages it gets."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        codecs: Seq[str] = (),
        guarded: Seq[str] = (),
    ):
        shape = runner.shape
        slab_bytes = slab_bytes_for(shape.num_layers, shape.heads, shape.head_dim)
        arena_bytes, self._workspace_bytes = measure_memory(config, runner)
        self.pool, self.arena = make_pool(arena_bytes, slab_bytes, runner.device)
        self.listed = {parse_plan(spec, shape): spec for spec in codecs}
        self.plan = lru_cache(maxsize=64)(lambda spec: self._listed_plan(spec, shape))
        self._runner = runner
        self._config = config
        self._clock = clock
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self.rows = DecodeSlots(config.max_sequences)
        self._scheduler = Scheduler(
            self.pool, config.max_batch_tokens, self.rows, config.watermark
        )
        self._prefixes = ExactPrefixes(self.pool, self.arena, shape)
        self._guard = CodecErrorProbe(list(map(self.plan, guarded)))
        self.counts = Counter[
            str
        ]()  # "computed_tokens", "cached_tokens" of prompts, "preempted"
        self._orders = count()
        self._draining = False
        self._refused: Sequence | None = None  # who last found no room
        self._output = StepOutput()  # of the step that runs

    def _listed_plan(self, spec: str, shape: KVShape) -> Plan:
        """The plan of a spec; UnknownNameError where only listed ones are served."""
        plan = parse_plan(spec, shape)
        if self.listed and plan not in self.listed:
            raise UnknownNameError.of(
                "codec of this service", spec, self.listed.values()
            )
        return plan

    def submit(self, message: Message) -> None:
        """Put a message into the inbox, from any thread."""
        self._inbox.put(message)

    def may_reserve(self) -> bool:
        """Whether room may be promised to others: no sequence here waits for any. Any thread."""
        refused = self._refused is not None and self._refused.status is Status.QUEUED
        return not refused and self._scheduler.sole is None

    @property
    def load(self) -> EngineLoad:
        """What it does and could take now. Any thread."""
        queues = self._scheduler
        running, waiting, held = map(len, (queues.active, queues.waiting, queues.held))
        return EngineLoad(running, waiting, held, queues.free_bytes, queues.slots)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and no record held for another worker."""
        queues = self._scheduler
        return (
            not (queues.waiting or queues.active or queues.held) and self._inbox.empty()
        )

    def run(self, deliver: Callable[[StepOutput], None]) -> None:
        """Step until drained; the life of the engine's thread. `deliver` must not block.

        It hears of every step that brought something or changed the load.
        """
        load = EngineLoad()
        while not (self._draining and self.idle):
            if not self._scheduler.active and self._inbox.empty():
                self._wait()
            output, before = self.step(), load
            load = self.load
            if output != StepOutput() or load != before:
                deliver(output)

    def step(self) -> StepOutput:
        """One turn of the loop. Never blocks; with nothing to do it returns an empty output."""
        while not self._inbox.empty():
            self._take(self._inbox.get())
        shares, stash = self._schedule()
        if shares:
            try:
                self._compute(shares, stash)
            except BaseException as error:
                self._give_up(shares, stash, error)
                if not isinstance(
                    error, Exception
                ):  # an interrupt: whoever steps hears no more
                    self._take_output()
                    raise
        return self._take_output()

    # -- drain inbox

    def _wait(self) -> None:
        """Block until there is a message; not for long where a sequence waits for room."""
        with suppress(Empty):
            self._take(
                self._inbox.get(timeout=WAIT_S if self._scheduler.waiting else None)
            )

    def _take(self, message: Message) -> None:
        """Do what a message says."""
        match message:
            case Abort(rid):
                if (sequence := self._scheduler.find(rid)) is not None:
                    self._end(sequence)
            case Prefill() | Admit():
                try:
                    self._start(message)
                except Exception as error:
                    for state in message.groups if isinstance(message, Admit) else ():
                        self.pool.release(state.ids())
                    self._output.failed.append(
                        Failed(message.request.rid, named(error))
                    )
            case Move(rid):
                if (sequence := self._scheduler.find(rid)) is not None:
                    self._prepare_to_move(sequence, message)
            case _:
                self._draining = True

    def _start(self, message: Prefill | Admit) -> None:
        """Queue a new sequence, and repeat the last token known of it: it may have been the end."""
        plan, emitted = self._check(message), list(message.emitted)
        born, order = self._clock(), next(self._orders)
        sequence = Sequence(message.request, plan, born, order, emitted=emitted)
        if isinstance(message, Admit):
            sequence.scores = list(message.logprobs)
            sequence.groups, sequence.n = (
                message.groups,
                message.moved or sequence.prompt_len,
            )
            sequence.promised = True
            sequence.enter(Status.DECODE)
            self._scheduler.activate(sequence)
        else:
            sequence.handoff = message.handoff
            sequence.born -= message.waited_s
            self._scheduler.queue(sequence)
        if emitted:
            self._say(sequence, sequence.finish_reason(self._runner.info))

    def _check(self, message: Prefill | Admit) -> Plan:
        """The plan of a request, or the error that says why it can never be served here."""
        request, info = message.request, self._runner.info
        tokens = len(request.tokens)
        if self._draining:
            raise PeerLostError("this worker is draining; it takes no new requests")
        if self._scheduler.find(request.rid) is not None:
            raise RequestError(f"request {request.rid!r} is here already")
        if tokens >= info.context_length:
            raise PromptTooLongError(
                f"prompt of {tokens} tokens; the model's context of {info.context_length} "
                f"holds at most {info.context_length - 1} and an answer"
            )
        for token in (*request.tokens, *message.emitted, *request.params.named_tokens):
            if not 0 <= token < info.vocab_size:
                raise RequestError(
                    f"token {token} is outside the vocabulary of {info.vocab_size}"
                )
        if isinstance(message, Admit) and not message.emitted:
            raise RequestError(
                f"request {request.rid!r} is admitted without its first token"
            )
        plan = self.plan(request.codec)
        needed, room = plan.nbytes(tokens + 1), self.pool.arena.nbytes
        if needed > room:
            raise PromptTooLongError(
                f"prompt of {tokens} tokens needs {needed} bytes of KV; the pool holds {room}"
            )
        if not isinstance(message, Admit):
            self._check_workspace(plan, tokens)
        return plan

    def _check_workspace(self, plan: Plan, tokens: int) -> None:
        """PromptTooLongError for a prompt whose exact KV has no room here while it prefills."""
        needed, room = self._prefill_bytes(plan, tokens), self._workspace_bytes
        if needed > room:
            raise PromptTooLongError(
                f"prompt of {tokens} tokens needs {needed} bytes of exact KV while it prefills; "
                f"there is room for {room}"
            )

    # -- schedule

    def _schedule(self) -> tuple[list[ScheduledTokens], StepAllocation]:
        """Who computes how many tokens, with the records that decoding needs for it."""
        shares, stash = self._grow()
        left, full = (
            self._config.max_batch_tokens - sum(share.count for share in shares),
            False,
        )
        for sequence in self._scheduler.prompts(self._clock()):
            if left <= 0:
                break
            if full and sequence.status is Status.QUEUED:
                continue
            if self._prepare(sequence, left):
                count = min(sequence.prompt_len - sequence.n, left)
                shares.append(ScheduledTokens(sequence, count))
                left -= count
            elif sequence.status is Status.QUEUED:
                self._refused, full = sequence, True
        return shares, stash

    def _grow(self) -> tuple[list[ScheduledTokens], StepAllocation]:
        """Decoding shares with the records they need; newer sequences make room for older ones.

        The answer of one that had the whole pool to itself from the start ends there; one that
        lies scattered, since others left, starts again with the pool to itself.
        """
        while True:
            shares = self._scheduler.decode_shares()
            try:
                return shares, take_stash(shares, self.pool)
            except CapacityError:
                victim = self._scheduler.preempt()
                if victim is None:  # all that decode here are about to leave
                    self._fail(
                        shares[-1].sequence, CapacityError("no room to grow; it moves")
                    )
                    continue
                self._requeued(victim)
                if not self.pool.referenced_pages:
                    if victim in (self._scheduler.alone, self._scheduler.sole):
                        self._say(victim, "length")
                    else:
                        self._scheduler.sole = victim

    def _requeued(self, sequence: Sequence) -> None:
        """A sequence lost its records: it starts again when there is room."""
        sequence.enter(Status.QUEUED)
        self.counts["preempted"] += 1
        self._refused = sequence

    def _prepare(self, sequence: Sequence, left: int) -> bool:
        """Whether a prompt can compute now, of a step with so many tokens left."""
        try:
            return sequence.status is not Status.QUEUED or self._admit(sequence, left)
        except Exception as error:
            self._fail(sequence, named(error))
            return False

    def _admit(self, sequence: Sequence, left: int) -> bool:
        """Begin with a prompt if there is room for it."""
        self._check_workspace(sequence.plan, sequence.prompt_len)
        begun = (x for x in self._scheduler.active if x.workspace is not None)
        wanted = sum(
            self._prefill_bytes(x.plan, x.prompt_len) for x in (sequence, *begun)
        )
        if wanted > self._workspace_bytes:
            return False
        try:
            if not self._scheduler.admit(sequence):
                return False
        except CapacityError as error:
            raise PromptTooLongError(
                f"{sequence.prompt_len} tokens: {error}"
            ) from error
        sequence.enter(Status.PREFILL)
        if sequence.handoff is not None:
            sequence.handoff.begin(sequence.plan, sequence.groups)
        self._make_workspace(sequence, left)
        return True

    def _prefill_bytes(self, plan: Plan, tokens: int) -> int:
        """Of the exact K and V of a prompt while it prefills."""
        rooms = rooms_of(plan, tokens, self._config.max_batch_tokens)
        return exact_bytes(self._runner.shape, sum(rooms)) // len(rooms)

    def _make_workspace(self, sequence: Sequence, left: int) -> None:
        """Room for exact K and V, and what is known of them.

        Taken at once where the prompt comes in more than one chunk.
        """
        rooms = rooms_of(
            sequence.plan, sequence.prompt_len, self._config.max_batch_tokens
        )
        sequence.workspace = self._runner.workspace(sequence.prompt_len, rooms)
        try:
            if left < sequence.prompt_len:
                dtype = getattr(torch, self._runner.info.dtype)
                sequence.workspace.reserve(dtype, self._runner.device)
            if self._config.prefix_cache:
                self._restore(sequence)
        except (MemoryError, RuntimeError) as error:
            what = f"no memory for the exact KV of a prompt of {sequence.prompt_len} tokens"
            raise CapacityError(f"{what}: {error}") from None

    def _restore(self, sequence: Sequence) -> None:
        """Begin behind what is known of a prompt; its last token is computed in any case.

        So are the last queries where a codec wants to see them, and everything where the whole
        prompt is to be scored.
        """
        wanted = max(
            1, *(codec_of(group).last_queries for group in sequence.plan.groups)
        )
        limit = 0 if sequence.scored else max(0, sequence.prompt_len - wanted)
        sequence.begin(self._prefixes.restore(sequence, limit))

    # -- forward

    def _compute(self, shares: Seq[ScheduledTokens], stash: StepAllocation) -> None:
        """One forward pass, and one more token for who has fed all it knows."""
        batch = build_batch(shares, stash, self.arena, self._chunk)
        logits = score_prompts(shares, self._runner.forward(batch))
        ready = [share.sequence for share in shares if share.completes]
        chosen = choose(ready, logits, self._runner.info.eos_ids)
        wait_for_kernels(
            self._runner.device
        )  # what they read may be written once it is released
        self._prefixes.close(whole=True)
        for decode in batch.decodes:
            self.pool.release(decode.step.freed)
        stash.loose.clear()
        self._advance(shares, ready, chosen)

    def _chunk(self, share: ScheduledTokens, row: int) -> Chunk:
        """A chunk of a prompt whose layers are encoded and offered as they finish."""
        sequence, workspace = share.sequence, share.sequence.workspace
        assert workspace is not None
        new = self._prefixes.open(sequence, sequence.n + share.count)

        def sink(layer: int, k: Tensor, v: Tensor, chunk: Chunk) -> None:
            if sequence.error is None:
                try:
                    self._encode(sequence, layer, k, v, chunk)
                    self._guard.look(sequence, layer, k, v, new.done)
                    self._prefixes.write(new, layer, k, v, chunk.tables[1])
                except Exception as error:
                    sequence.error = named(error)

        tables = tuple(map(RecordIds.of, sequence.groups)), new.tables
        return Chunk(row, share.count, sequence.n, workspace, sink, tables)

    def _encode(
        self, sequence: Sequence, layer: int, k: Tensor, v: Tensor, chunk: Chunk
    ) -> None:
        """Compress what a chunk made final in one layer, and offer it."""
        index, total = sequence.plan.group_of[layer], sequence.prompt_len
        group, places = sequence.plan.groups[index], chunk.tables[0][index]
        known = chunk.before == sequence.cached  # which is not encoded yet
        start = time.perf_counter()
        queries, codec = chunk.workspace.queries(layer), codec_of(group)
        peer_pages = 0
        if sequence.handoff is not None:
            pages = (Item(Kind.PAGE, index, layer, i) for i in range(len(places.pages)))
            peer_pages = len(list(takewhile(sequence.handoff.has, pages)))
        prompt = PromptChunk(
            k,
            v,
            total=total,
            before=0 if known else chunk.before,
            first=chunk.before + chunk.count - k.shape[1],
            queries=queries,
            peer_pages=peer_pages,
        )
        records = LayerRecords(group, layer, self.arena)
        written = write_prompt(codec, records, places, prompt)
        sequence.encode_s += time.perf_counter() - start
        if sequence.handoff is not None and written:
            found = (Item(w.kind, index, layer, i) for w in written for i in w.indices)
            sequence.handoff.offer(list(found))

    def _give_up(
        self, shares: Seq[ScheduledTokens], stash: StepAllocation, error: BaseException
    ) -> None:
        """A step broke and nobody can say for whom: all that were in it end.

        But if memory did not suffice it was for the longest prompt, and what can start again does.
        """
        wait_for_kernels(self._runner.device)
        self._prefixes.close(whole=False)
        self.pool.release(stash.lost(shares))
        told = named(error)
        prompts = [
            x.sequence for x in shares if not x.decodes and is_memory_error(error)
        ]
        asked = max(prompts, key=lambda x: x.prompt_len, default=None)
        for sequence in (share.sequence for share in shares):
            if sequence.status is Status.DONE:
                continue
            if asked in (None, sequence) or sequence.error or sequence.handoff:
                self._fail(sequence, sequence.error or told)
            else:
                self._scheduler.restart(sequence)
                self._requeued(sequence)

    def _advance(
        self, shares: Seq[ScheduledTokens], ready: Seq[Sequence], chosen: Seq[Sampled]
    ) -> None:
        """Count the tokens that were fed, and say which came of them."""
        for share in shares:
            sequence = share.sequence
            sequence.n += share.count
            if sequence.error is not None:
                self._fail(sequence, sequence.error)
            elif (
                sequence.status is Status.PREFILL and sequence.n == sequence.prompt_len
            ):
                sequence.workspace = None
                self.counts["cached_tokens"] += sequence.cached
                self.counts["computed_tokens"] += sequence.prompt_len - sequence.cached
                local = sequence.handoff is None
                sequence.enter(Status.DECODE if local else Status.HELD)
        for sequence, sampled in zip(ready, chosen, strict=True):
            if sequence.error is None:
                sequence.emitted.append(sampled.token)
                sequence.scores += [sampled.logprobs] if sampled.logprobs else []
                self._say(sequence, sequence.finish_reason(self._runner.info))
        for sequence in ready:
            if sequence.n == sequence.hold_at and sequence.status is Status.DECODE:
                self._hold(sequence)

    # -- who goes on elsewhere

    def _prepare_to_move(self, sequence: Sequence, move: Move) -> None:
        """Offer what is sealed; the rest follows when the sequence stops."""
        late = sequence.status is not Status.DECODE or sequence.length > move.tokens
        try:
            if late or sequence.handoff is not None:
                raise TransferError(
                    f"it has {sequence.length} tokens and is {sequence.status}; a sequence "
                    f"that decodes and has at most {move.tokens} can move"
                )
            sequence.handoff, sequence.hold_at = move.handoff, move.tokens
            move.handoff.begin(sequence.plan, sequence.groups)
        except Exception as error:
            self._fail(sequence, named(error))

    def _hold(self, sequence: Sequence) -> None:
        """Decode no longer; offer what is left of the records."""
        assert sequence.handoff is not None, "whoever stops here goes on elsewhere"
        try:
            for group, state in zip(sequence.plan.groups, sequence.groups, strict=True):
                self.pool.release(
                    state.drop(group.dropped(sequence.n) // group.page.tokens)
                )
            sequence.handoff.begin(sequence.plan, sequence.groups)
        except Exception as error:
            self._fail(sequence, named(error))
        else:
            sequence.enter(Status.HELD)
            self._scheduler.hold(sequence)
            self._output.moved.append(Moved(sequence.rid, tuple(sequence.emitted)))

    # -- what the world hears

    def _say(self, sequence: Sequence, reason: str | None) -> None:
        """Report the last token of a sequence; with a reason it is the end of the answer."""
        rid, token = sequence.rid, sequence.emitted[-1]
        scores, sequence.scores = tuple(sequence.scores), []
        if sequence.status is Status.HELD:
            self._scheduler.hold(sequence)
            told = (
                rid,
                token,
                reason,
                1e3 * sequence.encode_s,
                sequence.known or 0,
                scores,
            )
            self._output.prefilled.append(Prefilled(*told, relative_errors(sequence)))
            return
        if reason is not None:
            self._end(sequence)
        index = len(sequence.emitted) - 1
        self._output.tokens.append(
            Token(rid, index, token, reason, sequence.known or 0, scores)
        )

    def _fail(self, sequence: Sequence, error: DisaggError) -> None:
        self._end(sequence)
        self._output.failed.append(Failed(sequence.rid, error))

    def _end(self, sequence: Sequence) -> None:
        """Free a sequence and everything of it."""
        self._scheduler.remove(sequence)
        sequence.enter(Status.DONE)

    def _take_output(self) -> StepOutput:
        output, self._output = self._output, StepOutput()
        return output
