"""What messages do to the queues of an engine, before any step is scheduled."""

from collections.abc import Callable, Iterable
from itertools import count

from disagg.engine.messages import Abort, Admit, Failed, Message, Prefill, Release, Replay, Token
from disagg.engine.scheduler import Scheduler
from disagg.engine.sequence import Request, Sequence
from disagg.errors import DisaggError, PeerLostError, PromptTooLongError, RequestError
from disagg.metrics import Life, Status
from disagg.model.describe import ModelInfo
from disagg.plan import Plan
from disagg.pool import Pool


class Intake:
    """Makes sequences of requests, refuses what can never be served, and forgets on demand."""

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        pool: Pool,
        plan: Callable[[str], Plan],
        clock: Callable[[], float],
    ):
        self.draining = False
        self._info = info
        self._scheduler = scheduler
        self._pool = pool
        self._plan = plan
        self._clock = clock
        self._orders = count()

    def take(self, message: Message) -> list[Token | Failed]:
        """Do what a message says; what its sender should know at once."""
        match message:
            case Abort(rid) | Release(rid):
                self._forget(rid)
            case Prefill() | Replay() | Admit():
                return self._start(message)
            case _:
                self.draining = True
        return []

    def finish_reason(self, sequence: Sequence) -> str | None:
        """Why the answer ends with its last token; None: it goes on."""
        params, emitted = sequence.request.params, sequence.emitted
        if emitted and emitted[-1] in self._info.eos_ids and not params.ignore_eos:
            return "stop"
        full = sequence.length >= self._info.context_length
        return "length" if full or len(emitted) >= params.max_tokens else None

    def full(self, sequence: Sequence) -> Token:
        """The end of an answer that no pool has room to go on with: its last token once more."""
        index, token = len(sequence.emitted) - 1, sequence.emitted[-1]
        usage = sequence.usage(sequence.length - 1)  # the last token was never fed
        self.end(sequence)
        return Token(sequence.rid, index, token, "length", usage, dict(sequence.life.spent))

    def end(self, sequence: Sequence) -> None:
        """Free a sequence and everything of it."""
        self._scheduler.remove(sequence)
        sequence.life.enter(Status.DONE, self._clock())

    def _forget(self, rid: str) -> None:
        sequence = self._scheduler.find(rid)
        if sequence is not None:
            self.end(sequence)

    def _start(self, message: Prefill | Replay | Admit) -> list[Token | Failed]:
        groups = message.groups if isinstance(message, Admit) else ()
        try:
            sequence = self._sequence(message.request)
        except DisaggError as error:
            for state in groups:
                self._pool.release(list(state.ids()))
            return [Failed(message.request.rid, error)]
        if isinstance(message, Prefill):
            sequence.handoff = message.handoff
        else:
            sequence.emitted = list(message.emitted)
        if isinstance(message, Admit):
            sequence.groups, sequence.n = groups, sequence.prompt_len
            sequence.encode_s = message.encode_ms / 1e3
            sequence.life.enter(Status.DECODE, self._clock())
            self._scheduler.activate(sequence)
        else:
            self._scheduler.queue(sequence)
        return list(self._repeat(sequence))

    def _sequence(self, request: Request) -> Sequence:
        """A new sequence, or the error that says why it can never be served here."""
        info, tokens = self._info, len(request.tokens)
        if self.draining:
            raise PeerLostError("this worker is draining; it takes no new requests")
        if self._scheduler.find(request.rid) is not None:
            raise RequestError(f"request {request.rid!r} is here already")
        if tokens >= info.context_length:
            raise PromptTooLongError(
                f"prompt of {tokens} tokens; the model's context of {info.context_length} "
                f"holds at most {info.context_length - 1} and an answer"
            )
        strange = [x for x in request.tokens if not 0 <= x < info.vocab_size]
        if strange:
            raise RequestError(f"token {strange[0]} is outside the vocabulary of {info.vocab_size}")
        plan = self._plan(request.codec)
        needed, room = plan.nbytes(tokens + 1), self._pool.arena.nbytes
        if needed > room:
            raise PromptTooLongError(
                f"prompt of {tokens} tokens needs {needed} bytes of KV; the pool holds {room}"
            )
        return Sequence(request, plan, Life(self._clock()), next(self._orders))

    def _repeat(self, sequence: Sequence) -> Iterable[Token]:
        """The last known token once more; it may have ended the answer."""
        if not sequence.emitted:
            return
        index, token = len(sequence.emitted) - 1, sequence.emitted[-1]
        reason = self.finish_reason(sequence)
        usage = None
        if reason:
            usage = sequence.usage(max(sequence.n, sequence.prompt_len))
            self.end(sequence)
        yield Token(sequence.rid, index, token, reason, usage)
