"""How an attempt begins: with which codec, which cached prefixes, and on which workers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from disagg.config import AUTO, RouterConfig
from disagg.router.actions import Action, Reserve, Start
from disagg.router.codec_policy import CodecPolicy
from disagg.router.prefix_index import reason_of
from disagg.router.request_state import Phase, RequestState
from disagg.router.worker_state import WorkerState
from disagg.transfer.messages import Role, Work


class Starts:
    """Begins attempts on the workers that `placement` chose.

    requests, workers: all of them, by rid and by name
    routed:            times by (role, reason why a worker of this role was chosen)
    """

    def __init__(
        self,
        requests: Mapping[str, RequestState],
        workers: Mapping[str, WorkerState],
        config: RouterConfig,
    ):
        self.config = config
        self.codec_policy = CodecPolicy()
        self.routed: Counter[tuple[str, str]] = Counter()
        self._requests = requests
        self._workers = workers

    def begin(
        self,
        request: RequestState,
        prefill: WorkerState,
        decode: WorkerState,
        now: float,
    ) -> Action:
        """The next attempt, on this pair."""
        if request.job.codec == AUTO:
            self._choose_codec(request, prefill, decode, now)
        self._count_prefixes(request, prefill, decode)
        prefill.recent_tokens += len(request.job.prompt) - request.cached_tokens
        prefill.pause(now)
        decode.pause(now)
        request.prefill = prefill.name
        request.decode = decode.name
        request.prefill_done = False
        request.attempt_began = now
        request.job = replace(
            request.job,
            attempt=request.job.attempt + 1,
            emitted=request.emitted[:],
            deadline_s=request.deadline - now,
            moved=0,
            waited_s=now - request.arrived,
            senders=prefill.info.ranks,
        )
        if prefill is decode:
            request.phase = Phase.PREFILL
            return Start(prefill.name, request.job, Work.LOCAL)
        request.phase = Phase.RESERVE
        return Reserve(decode.name, request.job)

    def _choose_codec(
        self,
        request: RequestState,
        prefill: WorkerState,
        decode: WorkerState,
        now: float,
    ) -> None:
        """Choose its codec, for all attempts, among those that the decode worker lists."""
        tokens = len(request.job.prompt)
        info = decode.info
        bytes_ahead = sum(
            info.wire_bytes_of(other.job.codec, len(other.job.prompt))
            for other in self._requests.values()
            if other.prefill == prefill.name and not other.is_decoding
        )
        codec, reason = self.codec_policy.choose(
            {name: info.bytes_of(name, tokens) for name in info.sizes},
            budget=self.config.error_budget,
            free_bytes=decode.load.free_bytes,
            pair=(prefill.name, decode.name),
            left_s=request.arrived + self.config.first_decode_s - now,
            ahead_bytes=bytes_ahead,
            wire_sizes={name: info.wire_bytes_of(name, tokens) for name in info.sizes},
        )
        request.codec_reason = reason
        request.job = replace(request.job, codec=codec)

    def _count_prefixes(
        self, request: RequestState, prefill: WorkerState, decode: WorkerState
    ) -> None:
        """Count why a request goes to these workers; from now on they have its prefixes."""
        keys = request.prompt_keys
        num_tokens = len(request.job.prompt)
        resumable = prefill.resumable_tokens(keys)
        longest = max(x.resumable_tokens(keys) for x in self._workers.values())
        self.routed[Role.PREFILL.value, reason_of(resumable, longest)] += 1
        request.cached_tokens = min(resumable, num_tokens - 1)
        prefill.add_prompt(keys, num_tokens)
        if decode is not prefill:
            self._count_pages(decode, request.page_keys)

    def _count_pages(self, decode: WorkerState, keys: tuple[bytes, ...]) -> None:
        longest = max(x.prefixes.tokens(keys) for x in self._workers.values())
        reason = reason_of(decode.prefixes.tokens(keys), longest)
        self.routed[Role.DECODE.value, reason] += 1
        decode.prefixes.add(keys)
