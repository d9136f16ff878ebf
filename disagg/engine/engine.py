"""The engine: the one thread that runs the model. `Engine.step` can be recited:

    schedule   which sequences compute how many tokens; allocate the records they need
    build      one packed row of tokens, and what each layer group does with it
    forward    all layers; each one encodes and offers what a chunk of a prompt completes
    sample     one token for each sequence that has fed all its tokens
    advance    count the tokens, change states, report them in one `StepOutput`

Each step drains the inbox first. The engine blocks on an empty inbox and on its own kernels, and on
nothing else: never on a peer, a socket or a credit. An error in one request ends that request: its
pages are freed, and its `Failed` says why. If a step breaks and the culprit is unknown, all its
requests end; the engine lives.
"""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import count
from queue import Empty, SimpleQueue

from torch import Tensor

from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import EngineConfig
from disagg.engine.arena import (
    make_pool,
    max_rows,
    measure_memory,
    wait_for_kernels,
)
from disagg.engine.chunk_time import ChunkTime
from disagg.engine.grammars import SequenceGrammars, compiler_for
from disagg.engine.limits import check_pool, check_tokens
from disagg.engine.lookup import LookUp
from disagg.engine.messages import (
    Abort,
    Admit,
    Compiled,
    Drain,
    EngineLoad,
    Failed,
    Message,
    Move,
    Moved,
    Prefill,
    Prefilled,
    RequestMessage,
    StepOutput,
    Token,
    as_disagg_error,
    is_memory_error,
)
from disagg.engine.orders import ArenaOrder, StepOrders
from disagg.engine.progress import StepProgress
from disagg.engine.prompts import Prompts
from disagg.engine.sampler import Sampled, choose, score_prompts
from disagg.engine.scheduler import ScheduledTokens, Scheduler
from disagg.engine.sequence import Handoff, Sequence, Status
from disagg.engine.states import drop_exact_states, widen_states
from disagg.engine.steps import (
    StepAllocation,
    allocate_step,
    build_batch,
    plan_states,
)
from disagg.errors import (
    CapacityError,
    DisaggError,
    PeerLostError,
    PromptTooLongError,
    RanksLostError,
    RequestError,
    TransferError,
    UnknownNameError,
)
from disagg.grammar.compiler import GrammarCompiler
from disagg.grammar.state import GrammarState
from disagg.kv.decode_slots import DecodeSlots
from disagg.kv.page import ARENA_UNIT, EXACT
from disagg.kv.plan import Plan
from disagg.model.attention import Batch
from disagg.model.capacity import slab_bytes_for
from disagg.model.runner import Runner
from disagg.model.states.records import scratch_bytes
from disagg.paged.append import take_back

WAIT_S = 0.05  # how often a sequence without room looks again


class Engine:
    """Prefills and decodes; its messages say what to do with each request."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        codecs: Seq[str] = (),
        probed: Seq[str] = (),
        state: str = EXACT,
        expected: Seq[str] = ("raw",),
        grammars: GrammarCompiler | None = None,
        orders: StepOrders | None = None,
    ):
        """
        codecs:   those that may be served; none: all
        probed:   those whose error is sampled
        state:    the form in which states are handed off
        expected: codecs that slabs are sized for; others waste more of their ends
        grammars: compiles them for the model; None: one of its own
        orders:   to the followers of this rank's group, of which each begins a `Follower`; None:
                  there are none
        """
        shape = replace(runner.shape, state_form=state)
        arena_bytes, workspace_bytes = measure_memory(config, runner)
        plans = [parse_plan(spec, shape) for spec in expected]
        slab_bytes = slab_bytes_for(
            shape, plans, arena_bytes, runner.info.context_length
        )
        self.pool, self.arena = make_pool(
            arena_bytes, slab_bytes, runner.device, scratch_bytes(shape.states)
        )
        self._orders = orders
        if orders is not None:
            scratch = scratch_bytes(shape.states)
            nbytes = self.pool.arena.nbytes
            orders.send(ArenaOrder(nbytes, scratch, shape.state_form))
        # behind all pages of the pool
        self._scratch_page = self.pool.arena.nbytes // ARENA_UNIT
        self.listed = {parse_plan(spec, shape): spec for spec in codecs}
        self.plan = lru_cache(maxsize=64)(lambda spec: self._listed_plan(spec, shape))
        self._runner = runner
        self._config = config
        self._clock = clock
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        rows = max_rows(config, runner.device, plans[0], arena_bytes)
        self.decode_slots = DecodeSlots(rows)
        self._scheduler = Scheduler(
            self.pool, config.max_batch_tokens, self.decode_slots, config.watermark
        )
        context = runner.info.context_length
        self.grammar_compiler = grammars or compiler_for(runner.info)
        self._grammars = SequenceGrammars(self.grammar_compiler, runner.info.eos_ids)
        self.lookup = LookUp.on(
            runner.device.type, config, context, self._grammars.forced
        )
        # by request: its messages, while its grammar is being compiled
        self._uncompiled: dict[str, list[RequestMessage]] = {}
        self._chunk_time = ChunkTime(config.chunk_s)
        self.progress = StepProgress(clock)
        self._prompts = Prompts(
            runner=runner,
            config=config,
            pool=self.pool,
            arena=self.arena,
            workspace_bytes=workspace_bytes,
            probed=[self.plan(spec) for spec in probed],
            on_layer=self.progress.advance,
            orders=orders,
        )
        # "computed_tokens" and "cached_tokens" of prompts, "preempted"; of look-up speculation
        # "drafts", "draft_tokens" and "accepted_tokens"
        self.counts = Counter[str]()
        self._arrivals = count()
        self._draining = False
        self._last_refused: Sequence | None = None  # the last to find no room
        self._output = StepOutput()  # of the running step

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
        """Whether others may reserve room: no sequence here waits for any. Any thread."""
        refused = self._last_refused
        is_short = refused is not None and refused.status is Status.QUEUED
        return not is_short and self._scheduler.exclusive is None

    @property
    def most_snapshots(self) -> int | None:
        """How many snapshots of states it caches at most; None: its model has no states."""
        return self._prompts.most_snapshots

    @property
    def load(self) -> EngineLoad:
        """Its sequences by state, and its free room. Any thread."""
        scheduler = self._scheduler
        return EngineLoad(
            running=len(scheduler.active),
            waiting=len(scheduler.waiting) + len(self._uncompiled),
            held=len(scheduler.held),
            free_bytes=scheduler.free_bytes,
            slots=scheduler.slots,
        )

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and no record held for another worker."""
        scheduler = self._scheduler
        if scheduler.waiting or scheduler.active or scheduler.held:
            return False
        if self._uncompiled:
            return False
        return self._inbox.empty()

    def run(self, deliver: Callable[[StepOutput], None]) -> None:
        """Step until drained; the life of the engine's thread.

        deliver: gets the output of every step that has any or that changed the load; must not block
        """
        load = EngineLoad()
        while not (self._draining and self.idle):
            if not self._scheduler.active and self._inbox.empty():
                self._wait()
            output = self.step()
            load_before, load = load, self.load
            if output != StepOutput() or load != load_before:
                deliver(output)

    def step(self) -> StepOutput:
        """One turn of the loop. Never blocks; with nothing to do it returns an empty output."""
        self.progress.num_steps += 1
        with self.progress.running():
            return self._step()

    def _step(self) -> StepOutput:
        while not self._inbox.empty():
            self._handle(self._inbox.get())
        scheduled, allocation = self._schedule()
        self.progress.scheduled = scheduled
        if scheduled:
            prompt_tokens = sum(x.count for x in scheduled if not x.decodes)
            began = self._clock()
            try:
                self._compute(scheduled, allocation)
                self._chunk_time.learn(prompt_tokens, self._clock() - began)
            except BaseException as error:
                self._give_up(scheduled, allocation, error)
                if isinstance(error, RanksLostError) or not isinstance(
                    error, Exception
                ):
                    # an interrupt: the caller of this step gets no output of it
                    self._flush_output()
                    raise
        if self._orders is not None:
            self._orders.send_handoffs()
        return self._flush_output()

    # -- inbox

    def _wait(self) -> None:
        """Block until there is a message; only for a moment if a sequence waits for room."""
        timeout = WAIT_S if self._scheduler.waiting else None
        with suppress(Empty):
            message = self._inbox.get(timeout=timeout)
            with self.progress.running():
                self._handle(message)

    def _handle(self, message: Message) -> None:
        """Act on a message; those of a request wait until its grammar is compiled."""
        if isinstance(message, Compiled):
            for delayed in self._uncompiled.pop(message.rid):
                self._act(delayed)
        elif isinstance(message, Drain):
            self._draining = True
        elif self._is_compiling(message):
            self._uncompiled[message.rid].append(message)
        else:
            self._act(message)

    def _is_compiling(self, message: RequestMessage) -> bool:
        """Whether the grammar of a request is being compiled; begins that if it is new."""
        rid = message.rid
        if isinstance(message, Prefill | Admit) and rid not in self._uncompiled:

            def on_ready(start: Future[GrammarState]) -> None:
                self.submit(Compiled(rid, start))

            if not self._grammars.is_ready(message.request, on_ready):
                self._uncompiled[rid] = []
        return rid in self._uncompiled

    def _act(self, message: RequestMessage) -> None:
        match message:
            case Abort(rid):
                if (sequence := self._scheduler.find(rid)) is not None:
                    self._end(sequence)
            case Prefill() | Admit():
                self._start_or_fail(message)
            case Move(rid):
                if (sequence := self._scheduler.find(rid)) is not None:
                    self._prepare_to_move(sequence, message)

    def _start_or_fail(self, message: Prefill | Admit) -> None:
        try:
            self._start(message)
        except Exception as error:
            if isinstance(message, Admit):
                for state in message.groups:
                    self.pool.release(state.ids())
            failed = Failed(message.request.rid, as_disagg_error(error))
            self._output.failed.append(failed)

    def _start(self, message: Prefill | Admit) -> None:
        """Queue a new sequence, and repeat its last token if it has any: it may be the end."""
        sequence = Sequence(
            request=message.request,
            plan=self._check(message),
            born=self._clock(),
            order=next(self._arrivals),
            emitted=list(message.emitted),
        )
        self._grammars.begin(sequence)
        if isinstance(message, Admit):
            sequence.scores = list(message.logprobs)
            sequence.groups = message.groups
            self._widen_states(sequence)
            sequence.n = message.moved or sequence.prompt_len
            sequence.choose_rotation(shared=True)
            sequence.slot_promised = True
            sequence.enter(Status.DECODE)
            self._scheduler.activate(sequence)
        else:
            sequence.handoff = message.handoff
            sequence.born -= message.waited_s
            self._scheduler.queue(sequence)
        if sequence.emitted:
            self._emit_token(sequence, self._finish_reason(sequence))

    def _check(self, message: Prefill | Admit) -> Plan:
        """The plan of a request, or the error that says why it can never be served here."""
        request = message.request
        if self._draining:
            raise PeerLostError("this worker is draining; it takes no new requests")
        if self._scheduler.find(request.rid) is not None:
            raise RequestError(f"request {request.rid!r} is here already")
        check_tokens(request, message.emitted, self._runner.info)
        if isinstance(message, Admit) and not message.emitted:
            raise RequestError(
                f"request {request.rid!r} is admitted without its first token"
            )
        num_tokens = len(request.tokens)
        plan = self.plan(request.codec)
        check_pool(plan, num_tokens, self.pool)
        if not isinstance(message, Admit):
            self._prompts.check(plan, num_tokens)
        return plan

    # -- schedule

    def _schedule(self) -> tuple[list[ScheduledTokens], StepAllocation]:
        """Which sequences compute how many tokens, and the records that decoding needs for it."""
        scheduled, allocation = self._schedule_decodes()
        decoding = sum(x.count for x in scheduled)
        budget = self._config.max_batch_tokens - decoding
        piece = self._prompts.piece_tokens
        if scheduled:
            fitting = self._chunk_time.fit(budget, decoding)
            budget = max(fitting, min(budget, piece))
        is_full = False
        has_chunk = False
        for sequence in self._scheduler.prompts(self._clock()):
            if budget <= 0:
                break
            is_queued = sequence.status is Status.QUEUED
            if is_full and is_queued:
                continue
            tokens_left = sequence.prompt_len - sequence.n
            if has_chunk and budget < min(piece, tokens_left):
                continue  # the next step has room for a whole piece of it
            if self._prepare(sequence, budget):
                num_tokens = self._prompts.next_tokens(sequence, budget)
                scheduled.append(ScheduledTokens(sequence, num_tokens))
                budget -= num_tokens
                has_chunk = True
            elif sequence.status is Status.QUEUED:
                self._last_refused = sequence
                is_full = True
        return scheduled, allocation

    def _schedule_decodes(self) -> tuple[list[ScheduledTokens], StepAllocation]:
        """Decoding sequences with the records they need; newer ones make room for older ones.

        If a sequence has had the pool to itself from the start and finds no room, its answer ends.
        If others left pages scattered, it starts again with the pool to itself. A text that has
        outgrown the rotation of its keys is computed again.
        """
        for sequence in self._scheduler.outgrown():
            self._scheduler.restart(sequence)
            sequence.enter(Status.QUEUED)
        scheduled = self.lookup.add_drafts(self._scheduler.schedule_decodes())
        scheduled = self._grammars.cut_drafts(scheduled)
        if any(entry.draft for entry in scheduled):
            with suppress(CapacityError):
                return scheduled, allocate_step(scheduled, self.pool)
        while True:
            scheduled = self._scheduler.schedule_decodes()
            try:
                return scheduled, allocate_step(scheduled, self.pool)
            except CapacityError:
                victim = self._scheduler.preempt()
                if victim is None:  # all that decode here are about to leave
                    leaving = scheduled[-1].sequence
                    self._fail(leaving, CapacityError("no room to grow; it moves"))
                    continue
                self._on_preempted(victim)
                if not self.pool.referenced_pages:
                    self._restart_alone(victim)

    def _restart_alone(self, sequence: Sequence) -> None:
        """Let a preempted sequence have the whole pool; end its answer if it had it already."""
        scheduler = self._scheduler
        if sequence in (scheduler.alone_since_start, scheduler.exclusive):
            self._emit_token(sequence, "length")
        else:
            scheduler.exclusive = sequence

    def _on_preempted(self, sequence: Sequence) -> None:
        """A sequence lost its records: it starts again when there is room."""
        sequence.enter(Status.QUEUED)
        self.counts["preempted"] += 1
        self._last_refused = sequence

    def _prepare(self, sequence: Sequence, budget: int) -> bool:
        """Whether a prompt can compute now, in a step with `budget` tokens left."""
        try:
            if sequence.status is Status.QUEUED:
                return self._admit(sequence, budget)
            return True
        except Exception as error:
            self._fail(sequence, as_disagg_error(error))
            return False

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Begin with a prompt if there is room for it."""
        if not self._prompts.has_room(sequence, self._scheduler.active):
            return False
        try:
            if not self._scheduler.admit(sequence):
                return False
        except CapacityError as error:
            raise PromptTooLongError(
                f"{sequence.prompt_len} tokens: {error}"
            ) from error
        sequence.enter(Status.PREFILL)
        sequence.choose_rotation(shared=sequence.handoff is not None)
        if sequence.handoff is not None:
            self._begin_handoff(sequence, sequence.handoff)
        self._prompts.begin(sequence, budget)
        return True

    def _begin_handoff(self, sequence: Sequence, handoff: Handoff) -> None:
        """Let a hand-off have the records of a sequence, on all ranks."""
        handoff.begin(sequence.plan, sequence.groups)
        if self._orders is not None:
            self._orders.begin_handoff(sequence.rid, sequence.plan, sequence.groups)

    # -- build, forward, sample

    def _compute(
        self, scheduled: Seq[ScheduledTokens], allocation: StepAllocation
    ) -> None:
        """One forward pass, and one more token for each sequence that has fed all its tokens."""
        states = plan_states(
            scheduled, self._scratch_page, self._prompts.cuts, self._prompts.on_state
        )
        batch = build_batch(
            scheduled, allocation, self.arena, self._prompts.chunk, states
        )
        ready = [entry for entry in scheduled if entry.completes]
        masks = self._grammars.begin_masks(ready)
        logits = self._forward(batch)
        self._prompts.check_numbers(scheduled)
        logits = score_prompts(scheduled, logits)
        sampled = choose(ready, logits, self._runner.info.eos_ids, masks())
        # once released, the pages that kernels read may be written
        wait_for_kernels(self._runner.device)
        self._prompts.close(whole=True)
        for decode in batch.decodes:
            self.pool.release(decode.step.freed)
        allocation.loose.clear()
        self._advance(scheduled, ready, sampled)

    def _forward(self, batch: Batch) -> Tensor:
        """The logits of a step, computed by all ranks.

        RanksLostError for whatever goes wrong in a group: its other ranks wait for this one.
        """
        if self._orders is None:
            return self._runner.forward(batch)
        try:
            batch = self._runner.prepare(batch)
            self._orders.send_step(batch)
            return self._runner.forward(batch)
        except Exception as error:
            raise RanksLostError(f"a step of the group broke: {error}") from error

    def _give_up(
        self,
        scheduled: Seq[ScheduledTokens],
        allocation: StepAllocation,
        error: BaseException,
    ) -> None:
        """A step broke and the culprit is unknown: all its sequences end.

        If memory ran out, the longest prompt is the culprit; the others start again if they can.
        """
        wait_for_kernels(self._runner.device)
        self._prompts.close(whole=False)
        self.pool.release(allocation.lost(scheduled))
        failure = as_disagg_error(error)
        culprit = None
        if is_memory_error(error):
            prompts = [x.sequence for x in scheduled if not x.decodes]
            culprit = max(prompts, key=lambda x: x.prompt_len, default=None)
        for entry in scheduled:
            sequence = entry.sequence
            if sequence.status is Status.DONE:
                continue
            is_culprit = culprit is None or sequence is culprit
            if is_culprit or sequence.error or sequence.handoff:
                self._fail(sequence, sequence.error or failure)
            else:
                self._scheduler.restart(sequence)
                self._on_preempted(sequence)

    # -- advance

    def _advance(
        self,
        scheduled: Seq[ScheduledTokens],
        ready: Seq[ScheduledTokens],
        sampled: Seq[Seq[Sampled]],
    ) -> None:
        """Count the tokens that were fed, and report those that were sampled."""
        for entry in scheduled:
            sequence = entry.sequence
            sequence.n += entry.count
            if sequence.error is not None:
                self._fail(sequence, sequence.error)
            elif (
                sequence.status is Status.PREFILL and sequence.n == sequence.prompt_len
            ):
                self._on_prefilled(sequence)
        for entry, samples in zip(ready, sampled, strict=True):
            if entry.sequence.error is None:
                self._take_back(entry, len(samples) - 1)
                self._emit(entry.sequence, samples)
        for entry in ready:
            sequence = entry.sequence
            if sequence.n == sequence.hold_at and sequence.status is Status.DECODE:
                self._hold(sequence)

    def _take_back(self, entry: ScheduledTokens, right: int) -> None:
        """Forget the tokens of a draft behind its first `right` ones."""
        if not entry.draft:
            return
        sequence = entry.sequence
        sequence.n -= len(entry.draft) - right
        for group, state in zip(sequence.plan.paged, sequence.groups, strict=False):
            self.pool.release(take_back(group, state, sequence.n))
        self.lookup.learn(entry, right)
        self.counts["drafts"] += 1
        self.counts["draft_tokens"] += len(entry.draft)
        self.counts["accepted_tokens"] += right

    def _emit(self, sequence: Sequence, samples: Seq[Sampled]) -> None:
        """Report the next tokens of a sequence, up to the end of its answer."""
        for sample in samples:
            sequence.emitted.append(sample.token)
            if sample.logprobs:
                sequence.scores.append(sample.logprobs)
            try:
                reason = self._finish_reason(sequence)
            except RequestError as error:
                self._fail(sequence, error)
                break
            self._emit_token(sequence, reason)
            if reason is not None:
                break

    def _finish_reason(self, sequence: Sequence) -> str | None:
        """Why an answer ends with its last token; None: it goes on.

        RequestError for a token that its grammar does not allow.
        """
        reason = sequence.finish_reason(self._runner.info)
        if reason != "stop" and self._grammars.is_complete(sequence):
            return "stop"
        return reason

    def _on_prefilled(self, sequence: Sequence) -> None:
        """A prompt is computed: it decodes here, or is held for another worker."""
        sequence.workspace = None
        self.counts["cached_tokens"] += sequence.cached
        self.counts["computed_tokens"] += sequence.prompt_len - sequence.cached
        if sequence.handoff is None:
            self._widen_states(sequence)
            sequence.enter(Status.DECODE)
        else:
            self.pool.release(drop_exact_states(sequence))
            sequence.enter(Status.HELD)

    def _widen_states(self, sequence: Sequence) -> None:
        """From now on steps change its states: as exact as they are, also when they were sent."""
        wire_pages = widen_states(sequence, self.arena)
        if wire_pages:
            wait_for_kernels(self._runner.device)
            self.pool.release(wire_pages)

    # -- moving to another worker

    def _prepare_to_move(self, sequence: Sequence, move: Move) -> None:
        """Offer what is sealed; the rest follows when the sequence stops."""
        is_late = sequence.status is not Status.DECODE or sequence.length > move.tokens
        try:
            if is_late or sequence.handoff is not None:
                raise TransferError(
                    f"it has {sequence.length} tokens and is {sequence.status}; a sequence "
                    f"that decodes and has at most {move.tokens} can move"
                )
            if sequence.plan.is_long(move.tokens) and not sequence.is_long:
                raise TransferError(
                    f"it computes all its {move.tokens} tokens again before it can move"
                )
            sequence.handoff = move.handoff
            sequence.hold_at = move.tokens
            self._begin_handoff(sequence, move.handoff)
        except Exception as error:
            self._fail(sequence, as_disagg_error(error))

    def _hold(self, sequence: Sequence) -> None:
        """Stop decoding, and offer the rest of the records."""
        assert sequence.handoff is not None, "a sequence stops here only to move"
        try:
            for group, state in zip(sequence.plan.groups, sequence.groups, strict=True):
                pages = group.dropped_pages(sequence.n)
                self.pool.release(state.drop(pages))
            self._begin_handoff(sequence, sequence.handoff)
        except Exception as error:
            self._fail(sequence, as_disagg_error(error))
        else:
            sequence.enter(Status.HELD)
            self._scheduler.hold(sequence)
            self._output.moved.append(Moved(sequence.rid, tuple(sequence.emitted)))

    # -- output

    def _emit_token(self, sequence: Sequence, reason: str | None) -> None:
        """Report the last token of a sequence; with a reason it is the end of the answer."""
        scores = tuple(sequence.scores)
        sequence.scores = []
        if sequence.status is Status.HELD:
            self._scheduler.hold(sequence)
            prefilled = Prefilled(
                rid=sequence.rid,
                first_token=sequence.emitted[-1],
                finish_reason=reason,
                encode_ms=1e3 * sequence.encode_s,
                cached_tokens=sequence.first_cached or 0,
                logprobs=scores,
                errors=sequence.errors,
            )
            self._output.prefilled.append(prefilled)
            return
        if reason is not None:
            self._end(sequence)
        token = Token(
            rid=sequence.rid,
            index=len(sequence.emitted) - 1,
            token=sequence.emitted[-1],
            finish_reason=reason,
            cached_tokens=sequence.first_cached or 0,
            logprobs=scores,
        )
        self._output.tokens.append(token)

    def _fail(self, sequence: Sequence, error: DisaggError) -> None:
        self._end(sequence)
        self._output.failed.append(Failed(sequence.rid, error))

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence out of the engine and free its records."""
        self._scheduler.remove(sequence)
        sequence.enter(Status.DONE)

    def _flush_output(self) -> StepOutput:
        output = self._output
        self._output = StepOutput()
        return output
