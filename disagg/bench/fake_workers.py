"""Workers that compute nothing behind real gRPC, to measure the front end that stands before them.

Every step each running sequence gets a token. Its text is a word that names the moment at which it
was made, so that a client knows how long it was on its way. All workers of a fleet live in one
process, and a prefill worker passes a prompt on to its decode worker at once.
"""

import asyncio
import itertools
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from disagg.errors import CapacityError
from disagg.model.tokenizer import Tokenizer
from disagg.transfer.control import WorkerHandler, worker_handler
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    StepEvents,
    Submit,
    TokenEvent,
    Work,
    WorkerInfo,
    WorkerStatus,
)
from disagg.transfer.rpc import start_server

LOOPBACK = "127.0.0.1"
STAMP_S = 0.004  # between two stamps
TOKEN_BYTES = 1000  # of KV
HEARTBEAT_S = 1.0
EPOCH = 1
WORD = re.compile(" [A-Za-z]+")


class Stamps:
    """Tokens as moments: each is a word of its own, and they come one after another.

    They begin again after `len(tokens) * STAMP_S` seconds.
    """

    def __init__(self) -> None:
        tokenizer = Tokenizer.load()
        texts = {token: tokenizer.spell(token) for token in range(tokenizer.size)}
        self.tokens = [token for token, text in texts.items() if WORD.fullmatch(text)]
        self._stamp_of = {
            texts[token].strip(): stamp for stamp, token in enumerate(self.tokens)
        }

    def token(self, now: float) -> int:
        """The token of this moment on the monotonic clock."""
        return self.tokens[int(now / STAMP_S) % len(self.tokens)]

    def age_s(self, word: str, now: float) -> float | None:
        """How long ago the token of a word was made; None for the word of no token."""
        stamp = self._stamp_of.get(word)
        if stamp is None:
            return None
        stamps_ago = (now / STAMP_S - stamp) % len(self.tokens)
        return stamps_ago * STAMP_S


@cache
def load_stamps() -> Stamps:
    """The stamps of the model that ships in the package."""
    return Stamps()


@dataclass(frozen=True)
class FleetOptions:
    """Which fake workers there are.

    prefill, decode: workers of each role; without prefill workers, all serve prompts whole
    step_s: between two tokens of a sequence
    slots:  sequences that a worker takes
    room:   tokens of prompts that a worker takes
    """

    prefill: int = 0
    decode: int = 8
    step_s: float = 0.05
    slots: int = 1 << 20
    room: int = 1 << 40


@dataclass
class FakeSequence:
    """A sequence of a worker.

    num_tokens: of its answer
    runs:       it was submitted
    is_local:   its prompt was computed by the same worker, which reports its figures
    """

    job: Job
    num_tokens: int = 0
    runs: bool = False
    is_local: bool = False


class FakeWorker(WorkerHandler):
    """One worker of a fleet.

    first_step_s: when its first step ends; engines of a real fleet are not in step either
    """

    def __init__(
        self, role: Role, options: FleetOptions, fleet: "Fleet", first_step_s: float
    ):
        self._first_step_s = first_step_s
        self._hung_at: float | None = None
        self._num_steps = 0
        self._role = role
        self._options = options
        self._fleet = fleet
        self._epoch = EPOCH
        self._sequences: dict[str, FakeSequence] = {}
        self._prefilled: list[Submit] = []  # since the last step
        self._nonces = itertools.count(1)
        self._load = self._current_load()

    # -- calls of the router

    async def reserve(self, job: Job, epoch: int, router: str) -> Grant:
        load = self._current_load()
        if not load.slots or load.free_bytes < TOKEN_BYTES * job.tokens:
            raise CapacityError(f"no room for {job.tokens} tokens")
        self._sequences[job.rid] = FakeSequence(job)
        return Grant(next(self._nonces), self._epoch)

    async def submit(self, submit: Submit) -> None:
        if submit.work is Work.PREFILL:
            self._prefilled.append(submit)
        else:
            self.admit(submit.job, is_local=True)

    async def events(
        self, have: Mapping[str, int], router: str
    ) -> AsyncGenerator[StepEvents]:
        for rid, num_tokens in have.items():
            if rid in self._sequences:
                self._sequences[rid].num_tokens = num_tokens
        yield StepEvents(load=self._current_load())
        sent_at = time.monotonic()
        step_at = sent_at + self._first_step_s - self._options.step_s
        while True:
            step_at = max(step_at + self._options.step_s, time.monotonic())
            await asyncio.sleep(step_at - time.monotonic())
            events = tuple(self._step()) if self._hung_at is None else ()
            load = self._current_load()
            is_due = step_at >= sent_at + HEARTBEAT_S
            if events or is_due or self._has_changed(load):
                self._load = load
                sent_at = step_at
                yield StepEvents(events, load)

    async def acknowledge(self, have: Mapping[str, int], router: str) -> None:
        pass  # it keeps no events

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        sequence = self._sequences.get(rid)
        if sequence is not None and sequence.job.attempt <= attempt:
            del self._sequences[rid]

    async def fence(self, epoch: int, router: str) -> None:
        self._epoch = epoch
        self._sequences.clear()
        self._prefilled.clear()

    async def status(self) -> WorkerStatus:
        return WorkerStatus(self._epoch)

    # -- inside

    def admit(self, job: Job, is_local: bool = False) -> None:
        """Start to decode a sequence, behind the tokens that its client has."""
        self._sequences[job.rid] = FakeSequence(
            job, len(job.emitted), runs=True, is_local=is_local
        )

    def hang(self) -> None:
        """Its engine makes no step from now on, while it answers every call."""
        self._hung_at = time.monotonic()

    def _has_changed(self, load: Load) -> bool:
        return (load.slots, load.free_bytes) != (
            self._load.slots,
            self._load.free_bytes,
        )

    def _current_load(self) -> Load:
        held = sum(x.job.tokens for x in self._sequences.values())
        return Load(
            free_bytes=TOKEN_BYTES * max(0, self._options.room - held),
            slots=max(0, self._options.slots - len(self._sequences)),
            role=self._role,
            step=self._num_steps,
            stalled_s=0.0
            if self._hung_at is None
            else time.monotonic() - self._hung_at,
        )

    def _step(self) -> Iterator[TokenEvent]:
        """Hand prompts over, and make a token of each running sequence."""
        self._num_steps += 1
        for submit in self._prefilled:
            job = submit.job
            self._fleet.workers[submit.decode_address].admit(job)
            yield TokenEvent(job.rid, job.attempt, 0, stats=_figures(job))
        self._prefilled = []
        token = load_stamps().token(time.monotonic())
        for sequence in list(self._sequences.values()):
            if sequence.runs:
                yield self._token(sequence, token)

    def _token(self, sequence: FakeSequence, token: int) -> TokenEvent:
        job = sequence.job
        index = sequence.num_tokens
        reports = sequence.is_local and index == len(job.emitted)
        sequence.num_tokens += 1
        is_last = sequence.num_tokens >= job.sampling["max_tokens"]
        if is_last:
            del self._sequences[job.rid]
        num_logprobs = job.sampling.get("logprobs")
        return TokenEvent(
            job.rid,
            job.attempt,
            index,
            token,
            finish_reason="length" if is_last else "",
            stats=_figures(job) if reports else None,
            logprobs=() if num_logprobs is None else [_logprobs(num_logprobs)],
        )


def _figures(job: Job) -> dict[str, object]:
    """Of a hand-off, as a prefill worker reports them."""
    nbytes = TOKEN_BYTES * job.tokens
    return {
        "codec": "raw",
        "tokens": job.tokens,
        "wire_bytes": nbytes,
        "fp16_bytes": nbytes,
        "resident_bytes": nbytes,
    }


@cache
def _logprobs(count: int) -> list[object]:
    """Of a token: its own, and those of the likeliest ones."""
    tokens = load_stamps().tokens[:count]
    likeliest = [[token, -0.5 - rank] for rank, token in enumerate(tokens)]
    return [-0.5, likeliest]


class Fleet:
    """The workers by address, as the object of a `Child`."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}

    async def start(self, options: FleetOptions) -> list[WorkerInfo]:
        """Where each can be reached, in the order of their roles."""
        load_stamps()
        role = Role.DECODE if options.prefill else Role.BOTH
        roles = [Role.PREFILL] * options.prefill + [role] * options.decode
        self._servers = []
        infos = []
        for number, role in enumerate(roles):
            first_step_s = options.step_s * (number + 1) / len(roles)
            worker = FakeWorker(role, options, self, first_step_s)
            server, address = await start_server([worker_handler(worker)], LOOPBACK)
            self._servers.append(server)
            self.workers[address] = worker
            info = WorkerInfo(f"{role}-{number}", role, address, EPOCH)
            infos.append(info)
        return infos

    async def hang(self, address: str) -> None:
        """The engine of a worker stands still from now on."""
        self.workers[address].hang()
