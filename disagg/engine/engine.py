"""The engine: the one thread that runs the model. Its loop can be recited:

    drain inbox  →  schedule  →  forward (layers: encode, offer)  →  sample  →  one StepOutput

It blocks on an empty inbox and on nothing else: never on a peer, a socket or a credit.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache
from queue import Empty, SimpleQueue

from torch import Tensor

from disagg.codecs.layer import write_prompt
from disagg.codecs.planning import codec_of, parse_plan
from disagg.config import EngineConfig
from disagg.engine.arena import make_pool, slab_bytes_for
from disagg.engine.intake import Intake
from disagg.engine.messages import Failed, Load, Message, Prefilled, StepOutput, Token
from disagg.engine.sampler import sample
from disagg.engine.scheduler import Scheduler, Share
from disagg.engine.sequence import Sequence
from disagg.engine.steps import Stash, build_batch, take_stash
from disagg.errors import CapacityError, ConfigError, PromptTooLongError
from disagg.metrics import Status
from disagg.model.attention import Chunk
from disagg.model.runner import Runner
from disagg.wire import Item

WAIT_S = 0.05  # how often a sequence without room looks again


class Engine:
    """Prefills and decodes; what it does with a request is a matter of the messages it gets."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        config = config or EngineConfig()
        if config.max_batch_tokens < 1 or config.max_sequences < 1:
            raise ConfigError("max_batch_tokens and max_sequences must be at least 1")
        shape = runner.shape
        slab_bytes = slab_bytes_for(shape.num_layers, shape.heads, shape.head_dim)
        self.pool, self.arena = make_pool(config.arena_bytes, slab_bytes, runner.device)
        self.plan = lru_cache(maxsize=64)(lambda spec: parse_plan(spec, shape))
        self._runner = runner
        self._config = config
        self._clock = clock
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._scheduler = Scheduler(
            self.pool, config.max_batch_tokens, config.max_sequences, config.watermark
        )
        self._intake = Intake(runner.info, self._scheduler, self.pool, self.plan, clock)
        self._events: list[Token | Prefilled | Failed] = []
        self._preempted: list[str] = []

    def submit(self, message: Message) -> None:
        """Put a message into the inbox, from any thread."""
        self._inbox.put(message)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and no record held for another worker."""
        queues = self._scheduler
        return not (queues.waiting or queues.active or queues.held) and self._inbox.empty()

    def run(self, deliver: Callable[[StepOutput], None]) -> None:
        """Step until drained; the life of the engine's thread. `deliver` must not block."""
        load = Load()
        while not (self._intake.draining and self.idle):
            busy = self._scheduler.active or not self._inbox.empty()
            if not busy:
                self._wait()
            output = self.step()
            if not output.empty or output.load != load:
                deliver(output)
            load = output.load

    def step(self) -> StepOutput:
        """One turn of the loop. Never blocks; with nothing to do it returns an empty output."""
        self._drain_inbox()
        shares, stash = self._schedule()
        if shares:
            batch = build_batch(shares, stash, self.arena, self._chunk)
            logits = self._runner.forward(batch)
            for decode in batch.decodes:
                self.pool.release(decode.step.freed)
            self._advance(shares, logits)
        return self._take_output()

    # -- drain inbox

    def _wait(self) -> None:
        """Block until there is a message; not for long where a sequence waits for room."""
        timeout = WAIT_S if self._scheduler.waiting else None
        try:
            self._events += self._intake.take(self._inbox.get(timeout=timeout))
        except Empty:
            return

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            self._events += self._intake.take(self._inbox.get())

    # -- schedule

    def _schedule(self) -> tuple[list[Share], Stash]:
        shares, stash = self._grow()
        used = sum(share.count for share in shares)
        prefills = self._scheduler.prefill_shares(used)
        while used + sum(x.count for x in prefills) < self._config.max_batch_tokens:
            if self._preempted or not self._admit():
                break
            prefills = self._scheduler.prefill_shares(used)
        return shares + prefills, stash

    def _grow(self) -> tuple[list[Share], Stash]:
        """Decoding shares with the records they need; newer sequences make room for older ones.

        The answer of one that had the whole pool to itself ends there.
        """
        while True:
            shares = self._scheduler.decode_shares()
            try:
                return shares, take_stash(shares, self.pool)
            except CapacityError:
                victim = self._scheduler.preempt()
                assert victim is not None, "decoding sequences can always be preempted"
                victim.life.enter(Status.QUEUED, self._clock())
                self._preempted.append(victim.rid)
                if not self.pool.referenced_pages:
                    self._events.append(self._intake.full(victim))

    def _admit(self) -> bool:
        """Start the oldest waiting prompt if there is room; whether something changed."""
        try:
            sequence = self._scheduler.next_admissible()
        except CapacityError as error:
            oldest = self._scheduler.waiting[0]
            self._fail(oldest, PromptTooLongError(f"{oldest.prompt_len} tokens: {error}"))
            return True
        if sequence is None:
            return False
        sequence.life.enter(Status.PREFILL, self._clock())
        if sequence.handoff is not None:
            sequence.handoff.begin(sequence.plan, sequence.groups)
        return True

    def _fail(self, sequence: Sequence, error: PromptTooLongError) -> None:
        self._intake.end(sequence)
        self._events.append(Failed(sequence.rid, error))

    # -- forward

    def _chunk(self, share: Share, row: int) -> Chunk:
        """A chunk of a prompt whose layers are encoded and offered as they finish."""
        sequence, total = share.sequence, share.sequence.prompt_len
        workspace = sequence.workspace or self._runner.workspace(total)
        sequence.workspace = workspace
        codecs = [codec_of(group) for group in sequence.plan.groups]

        def sink(layer: int, k: Tensor, v: Tensor, before: int) -> None:
            index = sequence.plan.group_of[layer]
            group, state = sequence.plan.groups[index], sequence.groups[index]
            start = time.perf_counter()
            q = workspace.queries(layer)
            written = write_prompt(
                codecs[index], group, state, layer, self.arena, k, v, before, total, q
            )
            sequence.encode_s += time.perf_counter() - start
            if sequence.handoff is not None and written:
                sequence.handoff.offer(
                    [
                        Item(w.kind, index, layer, i)
                        for w in written
                        for i in range(w.first, w.first + w.count)
                    ]
                )

        return Chunk(row, share.count, sequence.n, workspace, sink)

    # -- sample

    def _advance(self, shares: Seq[Share], logits: Tensor) -> None:
        """Count the tokens that were fed; sample for the sequences that have none left."""
        ready = [share.sequence for share in shares if share.completes]
        params = [sequence.request.params for sequence in ready]
        tokens = sample(logits, params, [len(sequence.emitted) for sequence in ready])
        for share in shares:
            sequence = share.sequence
            sequence.n += share.count
            if sequence.life.status is Status.PREFILL and sequence.n == sequence.prompt_len:
                sequence.workspace = None
                local = sequence.handoff is None
                sequence.life.enter(Status.DECODE if local else Status.HELD, self._clock())
        for sequence, token in zip(ready, tokens, strict=True):
            sequence.emitted.append(token)
            self._events.append(self._report(sequence))

    def _report(self, sequence: Sequence) -> Token | Prefilled:
        """What the world hears of a sequence that has a new token."""
        reason = self._intake.finish_reason(sequence)
        rid, token = sequence.rid, sequence.emitted[-1]
        usage = sequence.usage(sequence.n)
        if sequence.life.status is Status.HELD:
            self._scheduler.active.remove(sequence)
            self._scheduler.held[rid] = sequence
            plan, spent = sequence.plan.fingerprint, dict(sequence.life.spent)
            return Prefilled(rid, token, reason, plan, usage, spent)
        index = len(sequence.emitted) - 1
        if reason is None:
            return Token(rid, index, token)
        self._intake.end(sequence)
        return Token(rid, index, token, reason, usage, dict(sequence.life.spent))

    def _take_output(self) -> StepOutput:
        events, preempted = self._events, self._preempted
        self._events, self._preempted = [], []
        queues = self._scheduler
        return StepOutput(
            tokens=tuple(x for x in events if isinstance(x, Token)),
            prefilled=tuple(x for x in events if isinstance(x, Prefilled)),
            failed=tuple(x for x in events if isinstance(x, Failed)),
            preempted=tuple(preempted),
            load=Load(
                running=len(queues.active),
                waiting=len(queues.waiting),
                held=len(queues.held),
                used_bytes=self.pool.used_bytes,
                arena_bytes=self.pool.arena.nbytes,
            ),
        )
