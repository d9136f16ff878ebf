"""`LLM`: the whole path in one process. For notebooks, for tests, for people with one GPU.

    prompt ─► prefill engine ─► frames ─► decode engine ─► text
              pool of its own   packed, checked, unpacked   pool of its own

Two engines with two pools share one model. Between them stand the frames and the hand-off rules of
the service; only sockets, processes and Ray are missing.
"""

import math
import reprlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from operator import index
from threading import Lock

from disagg.config import DEFAULT_CODEC, EngineConfig
from disagg.engine.arena import check_slabs, measure_memory
from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Admit, Prefill, Prefilled, Token
from disagg.engine.sequence import MAX_NUMBER, Logprobs, Request, SamplingParams
from disagg.errors import CapacityError, ConfigError, RequestError
from disagg.kv.plan import Plan
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer
from disagg.paged.doctor import check_plans
from disagg.transfer.receiver import Receiver
from disagg.transfer.reservations import Admission, ReceiverPolicy, Reservations
from disagg.transfer.stats import HandoffStats
from disagg.worker.in_process import InProcessHandoff

__all__ = ["LLM", "Completion", "HandoffStats", "SamplingParams"]


@dataclass(frozen=True)
class Completion:
    """One answer. `finish_reason`: "stop" (end of text) or "length".

    logprobs: of each token, where they are wanted; before them those of the prompt
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    kv: HandoffStats
    logprobs: tuple[Logprobs, ...] = ()


class LLM:
    """A model that answers prompts through compressed KV."""

    def __init__(
        self,
        model: str | None = None,
        codec: str = DEFAULT_CODEC,
        dtype: str = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
    ):
        """Load a model, by name or path; the packaged one unless given.

        codec: a spec such as "kivi:bits=2,group=64,residual=64", or a plan by layers
        Raises ModelError, UnknownNameError and ConfigError for what cannot be used.
        """
        self._runner = Runner.load(model, dtype, device)
        self._tokenizer = Tokenizer.load(model)
        self._codec = _codec_name(codec)
        config = config or EngineConfig()
        halves = [nbytes // 2 for nbytes in measure_memory(config, self._runner)]
        given = config.arena_bytes or halves[0], config.workspace_bytes or halves[1]
        config = replace(config, arena_bytes=given[0], workspace_bytes=given[1])
        self._prefill = Engine(self._runner, config)
        self._decode = Engine(self._runner, config)
        self._plan = cache(self._sound_plan)
        pool, plans = self._decode.pool, [self._plan(codec)]  # its errors now
        context = self._runner.info.context_length
        check_slabs(pool.arena.nbytes, pool.slab_bytes, plans, context)
        self._rids, self._turn = count(), Lock()
        terms = ReceiverPolicy(
            model=self._runner.fingerprint,
            plan_of=self._decode.plan,
            epoch=1,
            lease_s=math.inf,
            rows=self._decode.rows,
            may_reserve=self._decode.may_reserve,
        )
        drop = lambda rid, attempt, reason: self._decode.submit(Abort(rid))  # noqa: E731
        self._receiver = Receiver(
            Reservations(terms, self._decode.pool, self._take, drop)
        )

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        codec: str | None = None,
        n: int = 1,
    ) -> list[Completion]:
        """Answer prompts, all in one batch; `n` completions for each, in order.

        prompts: texts, or sequences of token ids · codec: instead of the one of this object
        n:       of the seed of `params` and those that follow, as over HTTP
        Calls of several threads take turns: one call with all prompts is faster.
        Raises RequestError for a prompt that cannot be answered, ConfigError for a codec; then
        none is.
        """
        if not isinstance(params, SamplingParams | None):
            raise RequestError(
                f"params are {reprlib.repr(params)}; SamplingParams(...) are wanted"
            )
        if not isinstance(n, int) or n < 1:
            raise RequestError(f"n is {reprlib.repr(n)}; an integer from 1 is wanted")
        params, codec = params or SamplingParams(), _codec_name(codec or self._codec)
        try:
            texts = [prompts] if isinstance(prompts, str) else [*prompts]
            seeds = [(params.seed + i) % MAX_NUMBER for i in range(n)]
            seeded = [replace(params, seed=seed) for seed in seeds]
            work = [
                self._prepare(text, each, codec) for text in texts for each in seeded
            ]
        except TypeError as error:
            wanted = "texts or lists of token ids, one for each prompt, are wanted"
            raise RequestError(
                f"prompts are {reprlib.repr(prompts)}; {wanted}"
            ) from error
        waiting = deque(work)
        with self._turn:
            self._plan(codec)  # its errors before anything is admitted
            try:
                while not all(x.finish_reason for x in work):
                    self._admit(waiting)
                    self._step({x.request.rid: x for x in work})
                self._prefill.step()  # frees what was acknowledged last
            except BaseException:
                self._abandon(work)
                raise
        return [x.completion(self._tokenizer) for x in work]

    def _sound_plan(self, codec: str) -> Plan:
        """The plan of a codec; ConfigError unless a GPU, where this is on one, computes with it."""
        plan = self._decode.plan(codec)
        if self._runner.graphs:
            check_plans([plan], self._runner.info.query_heads, self._runner.device)
        return plan

    def _prepare(
        self, prompt: str | Sequence[int], params: SamplingParams, codec: str
    ) -> "_Work":
        tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return _Work(
            Request(str(next(self._rids)), tuple(map(index, tokens)), params, codec)
        )

    def _admit(self, waiting: deque["_Work"]) -> None:
        """Start, in order, what the decode engine has room for."""
        while waiting:
            x = waiting[0]
            try:
                x.link = InProcessHandoff(x.request, self._receiver, self._prefill)
            except CapacityError:
                return
            self._prefill.submit(Prefill(waiting.popleft().request, x.link))

    def _step(self, work: dict[str, "_Work"]) -> None:
        """One step of each engine, and what the hand-offs between them can do now."""
        output = self._prefill.step()
        for prefilled in output.prefilled:
            work[prefilled.rid].hand_over(prefilled)
        following = self._decode.step()
        for failed in (*output.failed, *following.failed):
            raise failed.error
        for token in following.tokens:
            work[token.rid].take(token)
            if token.finish_reason:
                self._receiver.reservations.finished(token.rid, 0)

    def _take(self, admission: Admission) -> None:
        """A complete prompt, for the decode engine."""
        job = admission.job
        request = Request(
            job.rid, job.prompt, SamplingParams(**job.sampling), job.codec
        )
        self._decode.submit(
            Admit(request, admission.groups, (admission.commit.first_token,))
        )

    def _abandon(self, work: Sequence["_Work"]) -> None:
        """Leave nothing behind of a call that failed."""
        for x in work:
            self._receiver.reservations.abort(x.request.rid, 0, "the call failed")
            self._prefill.submit(Abort(x.request.rid))
        self._prefill.step()
        self._decode.step()


def _codec_name(codec: object) -> str:
    if isinstance(codec, str):
        return codec
    raise ConfigError(f"codec is {reprlib.repr(codec)}; the name of one is wanted")


@dataclass
class _Work:
    """A prompt on its way."""

    request: Request
    link: InProcessHandoff | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: tuple[Logprobs, ...] = ()

    def hand_over(self, prefilled: Prefilled) -> None:
        """Its prompt is computed; the first token may be the whole answer."""
        assert self.link is not None
        self.link.finish(prefilled)
        self.tokens.append(prefilled.first_token)
        self.finish_reason = prefilled.finish_reason or ""
        self.logprobs = prefilled.logprobs

    def take(self, token: Token) -> None:
        assert len(self.tokens) - 1 <= token.index <= len(self.tokens)
        self.tokens[token.index :] = [token.token]  # the last one may come once more
        self.finish_reason = token.finish_reason or ""
        self.logprobs += token.logprobs

    def completion(self, tokenizer: Tokenizer) -> Completion:
        assert self.link is not None
        assert self.link.stats is not None
        shown = self.tokens[:-1] if self.finish_reason == "stop" else self.tokens
        decoder = tokenizer.detokenizer(self.request.tokens)
        return Completion(
            text=decoder.add(shown) + decoder.finish(),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.tokens),
            kv=self.link.stats,
            logprobs=self.logprobs,
        )
