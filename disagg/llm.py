"""`LLM`: the whole path in one process. For notebooks, for tests, for a machine with one GPU.

    prompt ─► prefill engine ─► frames ─► decode engine ─► text
              pool of its own   packed, checked, unpacked   pool of its own

Two engines with two pools share one model. Between them are the frames and the hand-off rules of
the service; only sockets, processes and Ray are missing.
"""

import math
import reprlib
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import count
from operator import index
from threading import Lock
from typing import Any

from disagg.config import (
    DEFAULT_CODEC,
    RANK_TIMEOUT_S,
    EngineConfig,
    check_state_form,
)
from disagg.engine.arena import check_slabs, measure_memory
from disagg.engine.engine import Engine
from disagg.engine.grammars import compiler_for
from disagg.engine.messages import Abort, Admit, Prefill, Prefilled, Token
from disagg.engine.orders import CopyOrder
from disagg.engine.sampling_defaults import AUTO, read_sampling_defaults
from disagg.engine.sequence import MAX_NUMBER, Logprobs, Request, SamplingParams
from disagg.errors import CapacityError, ConfigError, RequestError, quoted
from disagg.kv.plan import Plan
from disagg.model.capacity import check_ranks_of
from disagg.model.chat import ChatTemplate
from disagg.model.runner import Runner
from disagg.model.text_stream import TextStream
from disagg.model.tokenizer import Tokenizer
from disagg.paged.doctor import check_plans
from disagg.parsers.answer import AnswerParser
from disagg.parsers.formats import AnswerFormats
from disagg.parsers.parts import Part, joined_parts
from disagg.transfer.receiver import Receiver
from disagg.transfer.reservations import Admission, ReceiverPolicy, Reservations
from disagg.transfer.rpc import tune_malloc
from disagg.transfer.stats import HandoffStats
from disagg.worker.in_process import InProcessHandoff
from disagg.worker.ranks import RankProcesses, share_threads

Message = Mapping[str, Any]  # "role" and "content", and what else a chat template reads

PREFILL, DECODE = range(2)  # numbers of the engines

__all__ = ["LLM", "Completion", "HandoffStats", "SamplingParams"]


@dataclass(frozen=True)
class Completion:
    """One answer. `finish_reason`: "stop" (end of text) or "length".

    logprobs: of each token, if `params` ask for them; before them those of the prompt, likewise
    parts:    of an answer of `chat`: its thoughts, content and calls
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    kv: HandoffStats
    logprobs: tuple[Logprobs, ...] = ()
    parts: tuple[Part, ...] = ()


class LLM:
    """A model that answers prompts through compressed KV.

    Like a worker, it makes glibc keep large buffers that are freed, for the whole process.
    """

    def __init__(
        self,
        model: str | None = None,
        codec: str = DEFAULT_CODEC,
        dtype: str = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
        context: int | None = None,
        generation_config: str = AUTO,
        state: str = AUTO,
        weights: str | None = None,
        ranks: int = 1,
        rank_timeout_s: float = RANK_TIMEOUT_S,
    ):
        """Load a model, by name or path; without one, the packaged model.

        codec:   a spec such as "kivi:bits=2,group=64,residual=64", or a plan by layers
        context: maximum tokens of a prompt with its answer; None: the default of the model
        generation_config: where `default_params` come from: "auto" (the model), "none", or a path
        state:   what the states of a hybrid model are rounded to when a prompt is computed:
                 "exact", "bf16", "int8", or "auto": exact with codec raw, else int8
        weights: on a CPU, what large linear layers are rounded to: "int8", "int4"; None: nothing
        ranks:   processes that compute it together, each with its share of heads and weights; on
                 GPUs, each has one of its own. `close` ends them
        rank_timeout_s: RanksLostError if one of them does not answer for this long
        Raises ModelError, UnknownNameError and ConfigError for arguments that cannot be used.
        """
        state = check_state_form(state)
        defaults = read_sampling_defaults(model, generation_config)
        self.default_params = SamplingParams(**defaults)
        tune_malloc()
        self._ranks: RankProcesses | None = None
        check_ranks_of(model, ranks)
        with ExitStack() as failure:
            if ranks > 1:
                self._return_threads = share_threads(ranks)
                failure.callback(self._return_threads)
                self._ranks = RankProcesses(
                    ranks, rank_timeout_s, model, dtype, device, context
                )
            with self._ranks.loading() if self._ranks else nullcontext():
                self._load(model, codec, dtype, device, config, context, state, weights)
            failure.pop_all()

    def _load(
        self,
        model: str | None,
        codec: str,
        dtype: str,
        device: str,
        config: EngineConfig | None,
        context: int | None,
        state: str,
        weights: str | None,
    ) -> None:
        group = self._ranks.group if self._ranks else None
        self._runner = Runner.load(
            model, dtype, device, context, weights=weights, group=group
        )
        if self._ranks is not None and self._runner.graphs:
            self._ranks.begin_serving()
        self._tokenizer = Tokenizer.load(model)
        self._codec = _codec_name(codec)
        config = _for_each_of_two(config or EngineConfig(), self._runner)
        expected = [self._codec]
        self._grammars = compiler_for(self._runner.info)
        self._prefill, self._decode = (
            Engine(
                self._runner,
                config,
                state=state,
                expected=expected,
                orders=self._ranks.orders() if self._ranks else None,
                grammars=self._grammars,
            )
            for _ in range(2)
        )
        self._handoffs: dict[str, InProcessHandoff] = {}  # of a group of ranks
        self._plan = cache(self._checked_plan)
        pool = self._decode.pool
        plan = self._plan(codec)  # raises its errors now
        context = self._runner.info.context_length
        check_slabs(pool.arena.nbytes, pool.slab_bytes, [plan], context)
        self._rids = count()
        self._lock = Lock()
        policy = ReceiverPolicy(
            model=self._runner.fingerprint,
            plan_of=self._decode.plan,
            epoch=1,
            lease_s=math.inf,
            decode_slots=self._decode.decode_slots,
            may_reserve=self._decode.may_reserve,
        )
        self._receiver = Receiver(
            Reservations(policy, pool, self._admit_to_decode, self._drop_from_decode)
        )

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        codec: str | None = None,
        n: int = 1,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Answer prompts, all in one batch; `n` completions for each, in order.

        prompts: a text, several texts, or sequences of token ids
        params:  None: `default_params`, which the model brings, or else greedy
        codec:   replaces the codec of this object for this call
        n:       completions with the seed of `params` and with those that follow, as over HTTP;
                 without a seed each has one of its own
        stop:    texts that end an answer, which does not have them
        Calls of several threads take turns: one call with all prompts is faster.
        Raises RequestError for a prompt that cannot be answered, ConfigError for a codec; in both
        cases no prompt is answered.
        """
        _check_options(params, n, stop)
        codec = _codec_name(codec or self._codec)
        params = params or self.default_params
        answers = self._prepare_all(prompts, params, codec, n, stop)
        waiting = deque(answers)
        with self._lock:
            self._plan(codec)  # raises its errors before anything is admitted
            if params.grammar:
                self._grammars.prepare(params.grammar).result()  # so does this
            try:
                by_rid = {answer.request.rid: answer for answer in answers}
                while not all(answer.finish_reason for answer in answers):
                    self._start(waiting)
                    self._step(by_rid)
                self._prefill.step()  # frees the records that were acknowledged last
                self._decode.step()  # and those of answers that a stop string ended
            except BaseException:
                self._abandon(answers)
                raise
        return [answer.completion() for answer in answers]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        codec: str | None = None,
        n: int = 1,
        stop: Sequence[str] = (),
        tools: Sequence[Message] = (),
    ) -> list[Completion]:
        """Answer conversations, which the chat template of the model writes, as `generate` does.

        conversations: the messages of one, [{"role": "user", "content": "Hello"}], or of several
        tools: definitions of functions in OpenAI's form, which the answers may call
        RequestError for a model without a chat template, and for messages and tools that it cannot
        take.
        """
        template = self._template
        if template is None:
            raise RequestError("the model has no chat template; use generate()")
        if tools and not template.writes_tools:
            raise RequestError("the model's chat template does not show tools")
        schemas = _schemas(tools) if tools else None
        is_one = all(isinstance(x, Mapping) for x in conversations)
        several = [conversations] if is_one else conversations
        options = {"tools": tools} if tools else {}
        texts = [
            template.render(messages, add_generation_prompt=True, **options)  # type: ignore[arg-type]
            for messages in several
        ]
        prompts = [self._tokenizer.encode(text, special=False) for text in texts]
        answers = self.generate(prompts, params, codec, n, stop)
        formats = AnswerFormats.choose(template.source)
        special_tokens = self._tokenizer.special_tokens
        params = params or self.default_params
        with_parts = []
        for number, answer in enumerate(answers):
            prompt = number // n
            parser = AnswerParser(formats, schemas, texts[prompt], special_tokens)
            stream = self._text_stream(prompts[prompt], params, stop, parser.marks)
            parts = _read_parts(parser, stream, answer.tokens)
            with_parts.append(replace(answer, parts=parts))
        return with_parts

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return ChatTemplate.load(str(self._runner.info.path))

    def _checked_plan(self, codec: str) -> Plan:
        """The plan of a codec; on a GPU, ConfigError unless the GPU computes with it correctly."""
        plan = self._decode.plan(codec)
        if self._runner.graphs:
            check_plans([plan], self._runner.info.query_heads, self._runner.device)
        return plan

    def _prepare_all(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams,
        codec: str,
        n: int,
        stop: Sequence[str],
    ) -> list["_PendingAnswer"]:
        """The answers to begin: `n` for each prompt."""
        try:
            texts = [prompts] if isinstance(prompts, str) else [*prompts]
            return [
                self._prepare(text, replace(params, seed=seed), codec, stop)
                for text in texts
                for seed in _seeds(params.seed, n)
            ]
        except TypeError as error:
            raise RequestError(
                f"prompts are {reprlib.repr(prompts)}; "
                "expected texts or lists of token ids, one for each prompt"
            ) from error

    def _prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        codec: str,
        stop: Sequence[str],
    ) -> "_PendingAnswer":
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = tuple(map(index, ids))
        request = Request(str(next(self._rids)), tokens, params, codec)
        return _PendingAnswer(request, self._text_stream(tokens, params, stop))

    def _text_stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        stop: Sequence[str],
        marks: Mapping[int, str] | None = None,
    ) -> TextStream:
        """Reads the text of an answer to a prompt. marks: as in `TextStream`"""
        return TextStream(
            self._tokenizer.detokenizer(prompt),
            stop,
            params.min_tokens,
            hidden=params.ends(self._runner.info.eos_ids),
            marks=marks,
        )

    def _start(self, waiting: deque["_PendingAnswer"]) -> None:
        """Prefill prompts, in order, while the decode engine has room for them."""
        while waiting:
            answer = waiting[0]
            try:
                answer.handoff = InProcessHandoff(
                    answer.request, self._receiver, self._prefill
                )
            except CapacityError:
                return
            waiting.popleft()
            if self._ranks is not None:
                self._handoffs[answer.request.rid] = answer.handoff
            self._prefill.submit(Prefill(answer.request, answer.handoff))

    def _step(self, answers: dict[str, "_PendingAnswer"]) -> None:
        """One step of each engine, with the hand-offs between them; answers: by request."""
        prefill_output = self._prefill.step()
        for prefilled in prefill_output.prefilled:
            answer = answers[prefilled.rid]
            answer.on_prefilled(prefilled)
            self._end_if_stopped(answer)
        decode_output = self._decode.step()
        for failed in (*prefill_output.failed, *decode_output.failed):
            raise failed.error
        for token in decode_output.tokens:
            answer = answers[token.rid]
            answer.on_token(token)
            if token.finish_reason:
                self._receiver.reservations.finished(token.rid, 0)
            self._end_if_stopped(answer)

    def _end_if_stopped(self, answer: "_PendingAnswer") -> None:
        """Free what an answer holds after a stop string."""
        if answer.stream.stopped:
            answer.finish_reason = "stop"
            rid = answer.request.rid
            self._receiver.reservations.abort(rid, 0, "a stop string ended it")

    def _admit_to_decode(self, admission: Admission) -> None:
        """The KV of a prompt is complete: decode it."""
        job = admission.job
        params = SamplingParams(**job.sampling)
        request = Request(job.rid, tuple(job.prompt), params, job.codec)
        first_token = admission.commit.first_token
        if self._ranks is not None:
            copies = self._handoffs.pop(job.rid).copies(admission.groups)
            self._ranks.send(DECODE, CopyOrder(PREFILL, tuple(copies)))
        self._decode.submit(Admit(request, admission.groups, (first_token,)))

    def _drop_from_decode(self, rid: str, attempt: int, reason: str) -> None:
        self._decode.submit(Abort(rid))

    def close(self) -> None:
        """End the other ranks; without any, nothing happens."""
        if self._ranks is not None:
            self._runner.leave_group()
            self._ranks.close()
            self._return_threads()

    def _abandon(self, answers: Sequence["_PendingAnswer"]) -> None:
        """Free everything of a call that failed."""
        for answer in answers:
            rid = answer.request.rid
            self._receiver.reservations.abort(rid, 0, "the call failed")
            self._prefill.submit(Abort(rid))
        self._prefill.step()
        self._decode.step()


def _for_each_of_two(config: EngineConfig, runner: Runner) -> EngineConfig:
    """The config of each of two engines on one device: what is not configured is halved."""
    arena_bytes, workspace_bytes = measure_memory(config, runner)
    parts = 2
    if runner.group is not None and runner.device.type == "cpu":
        parts *= runner.group.ranks  # which share the memory of this host
    return replace(
        config,
        arena_bytes=config.arena_bytes or arena_bytes // parts,
        workspace_bytes=config.workspace_bytes or workspace_bytes // parts,
    )


def _check_options(params: object, n: object, stop: Any) -> None:
    if not isinstance(params, SamplingParams | None):
        raise RequestError(
            f"params are {reprlib.repr(params)}; expected SamplingParams(...)"
        )
    if not isinstance(n, int) or n < 1:
        raise RequestError(f"n is {reprlib.repr(n)}; expected an integer from 1")
    is_list = isinstance(stop, Sequence) and not isinstance(stop, str)
    if not is_list or not all(isinstance(text, str) for text in stop):
        raise RequestError(f"stop is {reprlib.repr(stop)}; expected a list of texts")


def _schemas(tools: Sequence[Message]) -> dict[str, Mapping[str, Any]]:
    """The JSON schemas of the functions' parameters, by name; RequestError for other tools."""
    try:
        functions = [tool["function"] for tool in tools]
        schemas = {each["name"]: each.get("parameters") or {} for each in functions}
    except (TypeError, KeyError, AttributeError) as error:
        raise RequestError(
            f"tools are {reprlib.repr(tools)}; "
            'expected {"type": "function", "function": {"name": ...}} for each'
        ) from error
    for name, schema in schemas.items():
        if not isinstance(name, str):
            raise RequestError(
                f"the name of a function is {reprlib.repr(name)}; expected a text"
            )
        if not isinstance(schema, Mapping):
            raise RequestError(
                f"the parameters of {quoted(name)} are {reprlib.repr(schema)}; expected an object"
            )
    return schemas


def _read_parts(
    parser: AnswerParser, stream: TextStream, tokens: Sequence[int]
) -> tuple[Part, ...]:
    """The parts of a whole answer."""
    text = "".join(map(stream.add, tokens)) + stream.finish()
    return joined_parts([*parser.add(text), *parser.finish()])


def _seeds(seed: int | None, n: int) -> list[int]:
    """Seeds of the answers to one prompt: those that follow a seed, or random ones."""
    if seed is None:
        return [secrets.randbelow(MAX_NUMBER) for _ in range(n)]
    return [(seed + i) % MAX_NUMBER for i in range(n)]


def _codec_name(codec: object) -> str:
    if isinstance(codec, str):
        return codec
    raise ConfigError(f"codec is {reprlib.repr(codec)}; expected the name of one")


@dataclass
class _PendingAnswer:
    """A prompt and its answer so far."""

    request: Request
    stream: TextStream
    text: str = ""
    handoff: InProcessHandoff | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: tuple[Logprobs, ...] = ()

    def on_prefilled(self, prefilled: Prefilled) -> None:
        """Its prompt is computed; the first token may be the whole answer."""
        assert self.handoff is not None
        self.handoff.finish(prefilled)
        self._add(prefilled.first_token, prefilled.finish_reason)
        self.logprobs = prefilled.logprobs

    def on_token(self, token: Token) -> None:
        """Take the next token; the last one may come a second time."""
        assert len(self.tokens) - 1 <= token.index <= len(self.tokens)
        if token.index == len(self.tokens):
            self._add(token.token, token.finish_reason)
        self.finish_reason = token.finish_reason or ""
        self.logprobs += token.logprobs

    def _add(self, token: int, finish_reason: str | None) -> None:
        self.tokens.append(token)
        self.finish_reason = finish_reason or ""
        self.text += self.stream.add(token)

    def completion(self) -> Completion:
        assert self.handoff is not None
        assert self.handoff.stats is not None
        return Completion(
            text=self.text + self.stream.finish(),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.tokens),
            kv=self.handoff.stats,
            logprobs=self.logprobs,
        )
