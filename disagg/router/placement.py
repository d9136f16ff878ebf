"""Which workers a request goes to, given the requests that every worker has now.

The best prefill worker is the one that would finish the prompt first: it has the fewest tokens to
compute, of the prompts before this one and of this one less what is in its prefix cache. The best
decode worker has the fewest sequences; holding pages of the prompt makes up for a few of them.

A prompt that has waited long for room has a worker kept for it. Other requests go there only if
their answers end before there is room for it. So it starts at last, and a few long prompts do not
stop all others.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from disagg.router.candidates import Candidates, CandidateWorker, RequestKind
from disagg.router.mismatches import Mismatches
from disagg.router.request_state import ANY_WORKERS, RequestState
from disagg.router.worker_state import WorkerState

# prompts that may be before this one at a prefill worker, if they take more than one step
MAX_PROMPTS_AHEAD = 3
# a decode worker that holds all pages of the prompt may have this many more sequences
AFFINITY = 4
# a worker is kept for a prompt that has waited so long for room
PATIENCE_S = 5.0
# at most one of so many workers of a side is kept, but at least one
KEPT_OF = 8


class Placement:
    """The load of every worker while requests are placed, the most urgent first.

    It begins without requests: call `count` for those that workers already have.

    mismatches:  pairs that cannot hand over
    token_bytes: the least that a token of KV takes
    state_bytes: what the states of a sequence take besides
    """

    def __init__(
        self,
        workers: Iterable[WorkerState],
        now: float,
        mismatches: Mismatches,
        token_bytes: float = 0.0,
        state_bytes: float = 0.0,
    ):
        self._now = now
        self._mismatches = mismatches
        self._token_bytes = token_bytes
        self._state_bytes = state_bytes
        workers = list(workers)
        self._workers = [worker for worker in workers if now >= worker.open_until]
        ends = [x for y in workers for x in (y.open_until, y.refused_until) if x > now]
        # until then no breaker closes, and no refusal ends
        self._valid_until = min(ends, default=math.inf)
        # by worker: (rank, tokens to compute) of each prompt, and the sum of the tokens
        self._prompts: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self._tokens_left: Counter[str] = Counter()
        # by worker: requests in any phase
        self._num_requests: Counter[str] = Counter()
        # names of workers that get no other request
        self._exclusive: set[str] = set()
        # by name of a worker that is kept: tokens of the longest answer that ends in time
        self._kept: dict[str, float] = {}
        # the lowest rank of a request that a worker is kept for
        self._kept_rank = math.inf
        roles = [worker.info.role for worker in self._workers]
        self._keepable_prefills = _share(sum(role.prefills for role in roles))
        self._keepable_decodes = _share(sum(role.decodes for role in roles))
        # by worker, computed when first needed; void for workers that get another request
        self._rooms: dict[str, float] = {}
        self._busy_ranks: dict[str, float] = {}
        # computed when first needed; void when a worker has got a request or is kept
        self._candidates: dict[RequestKind, list[Candidates]] = {}
        self._min_tokens: list[int] | None = None
        self._requests: list[RequestState] = []

    def count(self, request: RequestState) -> None:
        """Add a request that its workers already have. Call it before anything is chosen."""
        self._requests.append(request)
        for name in request.occupied_workers:
            self._num_requests[name] += 1
            if request.exclusive:
                self._exclusive.add(name)
        if request.prefill is not None and not request.prefill_done:
            tokens_left = request.num_prompt_tokens - request.cached_tokens
            self._prompts[request.prefill].append((request.rank, tokens_left))
            self._tokens_left[request.prefill] += tokens_left

    def choose(self, request: RequestState) -> tuple[WorkerState, WorkerState] | None:
        """The prefill and the decode worker of a request; None if it has to wait.

        The same worker twice means local work. The pair that refused the request last is chosen
        only if there is no other. An exclusive request goes to the emptiest workers.
        """
        if request.exclusive:
            return self._choose_exclusive(request)
        candidates = self._candidates_of(request)
        rank = request.rank
        tokens = request.num_prompt_tokens
        fitting = [x for x in candidates if x.fits(rank, tokens)]
        if not fitting:
            for each in candidates:
                self._keep_workers(request, each)
            return None
        prefills = [y for x in fitting for y in x.prefills_for(rank, tokens)]
        if fitting[0].is_local:
            best = self._best_prefill(request, prefills)
            return best, best
        decodes = [y for x in fitting for y in x.decodes_for(tokens)]
        return self._best_pair(request, prefills, decodes)

    def may_start(self, request: RequestState, now: float) -> bool:
        """Whether some pair may have room for a new request, so that placing it is worth a try."""
        is_first = self._kept and request.rank < self._kept_rank
        if is_first or now >= self._valid_until:
            return True
        tokens = request.num_prompt_tokens
        candidates = self._candidates_of(request)
        return any(x.fits(request.rank, tokens) for x in candidates)

    def add(self, request: RequestState) -> None:
        """Count a request that was placed. If it opened a breaker again, no other follows it."""
        self.count(request)
        self._candidates.clear()
        for name in request.workers:
            self._rooms.pop(name, None)
            self._busy_ranks.pop(name, None)
        self._workers = [x for x in self._workers if self._now >= x.open_until]
        if request.exclusive:
            self._min_tokens = None

    def choose_target(
        self, request: RequestState, source: WorkerState
    ) -> WorkerState | None:
        """The worker on which a sequence continues when its own, `source`, stops decoding.

        None if there is none now. An exclusive request waits for an empty worker, which accepts
        no other request meanwhile.
        """
        tokens = request.num_prompt_tokens + len(request.emitted)
        workers = [x for x in self._open_workers(request) if x.info.role.decodes]
        workers = self._mismatches.fitting(source, workers, request.job.codec)
        roomy = [x for x in workers if tokens <= self._room(x)]
        if not roomy:
            if workers and self._is_patient(request) and self._keepable_decodes:
                self._keepable_decodes -= 1
                self._keep(request, workers)
            return None

        def cost(worker: WorkerState) -> tuple[bool, int, int]:
            has_refused = worker.name in request.avoid
            num_requests = self._num_requests[worker.name]
            return has_refused, num_requests, -worker.load.free_bytes

        target = min(roomy, key=cost)
        if request.exclusive and not self._claim(target):
            return None
        self._num_requests[target.name] += 1
        self._rooms.pop(target.name, None)
        self._candidates.clear()
        return target

    # -- load of the workers

    def _room(self, worker: WorkerState) -> float:
        """Length of the longest prompt that may find room; an empty worker has room for any."""
        room = self._rooms.get(worker.name)
        if room is None:
            is_empty = not self._num_requests[worker.name]
            token_bytes = 0.0 if is_empty else self._token_bytes
            room = worker.room(token_bytes, self._now, self._state_bytes)
            self._rooms[worker.name] = room
        return room

    def _busy_rank(self, worker: WorkerState) -> float:
        """The worker would not begin prompts of this rank or a higher one soon.

        Enough prompts are before them: three at least, which take more than one step.
        """
        busy_rank = self._busy_ranks.get(worker.name)
        if busy_rank is None:
            busy_rank = self._find_busy_rank(worker)
            self._busy_ranks[worker.name] = busy_rank
        return busy_rank

    def _find_busy_rank(self, worker: WorkerState) -> float:
        tokens_ahead = 0
        prompts = sorted(self._prompts[worker.name])
        for index, (rank, tokens_left) in enumerate(prompts, start=1):
            tokens_ahead += tokens_left
            is_step_full = tokens_ahead >= worker.info.step_tokens
            if index >= MAX_PROMPTS_AHEAD and is_step_full:
                return rank
        return math.inf

    # -- candidates

    def _candidates_of(self, request: RequestState) -> list[Candidates]:
        kind = self._kind(request)
        if kind not in self._candidates:
            self._candidates[kind] = self._find_candidates(kind)
        return self._candidates[kind]

    def _kind(self, request: RequestState) -> RequestKind:
        min_tokens = 0
        thresholds = self._thresholds()
        if thresholds and request.at == ANY_WORKERS:
            tokens = request.num_prompt_tokens
            min_tokens = next((x for x in thresholds if x > tokens), 0)
        num_kept = 0
        if self._kept:
            num_kept = sum(self._ends_in_time(request, name) for name in self._kept)
        return RequestKind(request.at, request.is_single_token, min_tokens, num_kept)

    def _thresholds(self) -> list[int]:
        """Every `min_tokens` of a decode worker that is open to requests, sorted."""
        if self._min_tokens is None:
            decodes = [
                worker
                for worker in self._workers
                if worker.info.role.decodes and worker.name not in self._exclusive
            ]
            self._min_tokens = sorted({x.info.min_tokens for x in decodes} - {0})
        return self._min_tokens

    def _find_candidates(self, kind: RequestKind) -> list[Candidates]:
        """One for each group of workers that can hand over to each other."""
        by_limit = sorted(self._kept, key=lambda name: -self._kept[name])
        closed = self._exclusive.union(by_limit[kind.num_kept :])
        workers = [x for x in self._workers if x.name not in closed]
        eligible_prefills, eligible_decodes = _eligible(kind, workers)
        prefills = defaultdict(list)
        for worker in eligible_prefills:
            candidate = CandidateWorker(
                worker, self._room(worker), self._busy_rank(worker)
            )
            prefills[worker.info.speaks].append(candidate)
        decodes = defaultdict(list)
        for worker in eligible_decodes:
            candidate = CandidateWorker(worker, self._room(worker), math.inf)
            decodes[worker.info.speaks].append(candidate)
        return [
            Candidates(prefills[speaks], decodes.get(speaks, ()), kind)
            for speaks in prefills
        ]

    def _open_workers(self, request: RequestState) -> list[WorkerState]:
        """The workers that are not exclusive, nor kept for others longer than it takes."""
        return [
            worker
            for worker in self._workers
            if worker.name not in self._exclusive
            and self._ends_in_time(request, worker.name)
        ]

    # -- workers that are kept for prompts that wait for room

    def _is_patient(self, request: RequestState) -> bool:
        return self._now - request.arrived >= PATIENCE_S

    def _ends_in_time(self, request: RequestState, worker: str) -> bool:
        """Whether a request ends before there is room for the prompt that a worker is kept for."""
        return request.answer_tokens <= self._kept.get(worker, math.inf)

    def _keep_workers(self, request: RequestState, candidates: Candidates) -> None:
        """Keep the worker with the most room, on each side that has no room for a prompt."""
        tokens = request.num_prompt_tokens
        prefill_room = candidates.prefill_room(request.rank)
        if not self._is_patient(request) or not prefill_room:
            return
        if tokens > prefill_room and self._keepable_prefills:
            self._keepable_prefills -= 1
            self._keep(request, candidates.prefills_for(request.rank))
        is_split = not candidates.is_local
        if is_split and tokens > candidates.decode_room and self._keepable_decodes:
            self._keepable_decodes -= 1
            self._keep(request, candidates.decodes_for(0))

    def _keep(self, request: RequestState, workers: list[WorkerState]) -> None:
        workers = [worker for worker in workers if worker.name not in self._kept]
        if not workers:
            return
        roomiest = max(workers, key=lambda x: x.load.free_bytes)
        self._kept[roomiest.name] = self._answer_limit(request, roomiest)
        self._kept_rank = min(self._kept_rank, request.rank)
        request.has_kept_worker = True
        self._candidates.clear()

    def _answer_limit(self, request: RequestState, worker: WorkerState) -> float:
        """Tokens of the longest answer that ends before a worker has room for a prompt.

        All sequences of a worker get a token per step. So its answers end in the order of the
        tokens that they still may have, and each makes room for another.
        """
        tokens = request.num_prompt_tokens + len(request.emitted)
        missing_bytes = self._bytes_of(tokens, request, worker)
        missing_bytes -= worker.load.free_bytes
        running = [x for x in self._requests if x.decode == worker.name]
        running.sort(key=lambda x: x.answer_tokens)
        limit = 0.0
        for other in running:
            if other.answer_tokens == math.inf:
                break
            limit = other.answer_tokens
            tokens = other.num_prompt_tokens + len(other.emitted)
            missing_bytes -= self._bytes_of(tokens, other, worker)
            if missing_bytes <= 0:
                break
        return limit

    def _bytes_of(
        self, tokens: int, request: RequestState, worker: WorkerState
    ) -> float:
        nbytes = worker.info.bytes_of(request.job.codec, tokens)
        return nbytes or tokens * self._token_bytes

    # -- the best workers

    def _choose_exclusive(
        self, request: RequestState
    ) -> tuple[WorkerState, WorkerState] | None:
        """The emptiest workers, which get no other request from now on; None until empty."""
        workers = self._open_workers(request)
        kind = self._kind(request)
        prefills, decodes = _eligible(kind, workers)
        if not prefills:
            return None
        if kind.is_local:
            prefill = self._best_prefill(request, prefills)
            pair = prefill, prefill
        else:
            best = self._best_pair(request, prefills, decodes)
            if best is None:
                return None
            pair = best
        return pair if self._claim(*pair) else None

    def _best_pair(
        self,
        request: RequestState,
        prefills: list[WorkerState],
        decodes: list[WorkerState],
    ) -> tuple[WorkerState, WorkerState] | None:
        """The best prefill worker that can hand over, and the best decode worker for it."""
        while prefills:
            prefill = self._best_prefill(request, prefills)
            if prefill in decodes:
                return prefill, prefill
            codec = request.job.codec
            fitting = self._mismatches.fitting(prefill, decodes, codec)
            if fitting:
                return prefill, self._best_decode(request, fitting)
            prefills = [worker for worker in prefills if worker is not prefill]
        return None

    def _best_prefill(
        self, request: RequestState, workers: list[WorkerState]
    ) -> WorkerState:
        """The worker with the fewest tokens to compute until this prompt is done."""

        def cost(worker: WorkerState) -> tuple[bool, int, int, float]:
            has_refused = worker.name in request.avoid
            num_requests = self._num_requests[worker.name] if request.exclusive else 0
            cached_tokens = worker.resumable_tokens(request.prompt_keys)
            tokens_left = self._tokens_left[worker.name] - cached_tokens
            return has_refused, num_requests, tokens_left, worker.recent_tokens

        return min(workers, key=cost)

    def _best_decode(
        self, request: RequestState, workers: list[WorkerState]
    ) -> WorkerState:
        """The worker with the fewest sequences, after credit for pages that it holds already."""
        keys = request.page_keys

        def cost(worker: WorkerState) -> tuple[bool, float, int]:
            has_refused = worker.name in request.avoid
            cached_tokens = worker.prefixes.tokens(keys)
            affinity = AFFINITY * cached_tokens / request.num_prompt_tokens
            num_requests = self._num_requests[worker.name] - affinity
            return has_refused, num_requests, -worker.load.free_bytes

        return min(workers, key=cost)

    def _claim(self, *workers: WorkerState) -> bool:
        """Give workers no other request from now on; whether all of them are empty already."""
        self._exclusive.update(worker.name for worker in workers)
        self._candidates.clear()
        self._min_tokens = None
        return not any(self._num_requests[worker.name] for worker in workers)


def _share(num_workers: int) -> int:
    """How many of these workers may be kept."""
    return max(1, num_workers // KEPT_OF)


def _eligible(
    kind: RequestKind, workers: list[WorkerState]
) -> tuple[list[WorkerState], list[WorkerState]]:
    """The workers that may prefill and decode requests of a kind, by role and by name."""
    prefill_name, decode_name = kind.at
    decodes = _named(decode_name, [x for x in workers if x.info.role.decodes])
    if kind.min_tokens:
        whole = [x for x in decodes if x.info.min_tokens >= kind.min_tokens]
        return whole, whole
    prefills = _named(prefill_name, [x for x in workers if x.info.role.prefills])
    return prefills, prefills if kind.is_single_token else decodes


def _named(name: str, workers: list[WorkerState]) -> list[WorkerState]:
    """The worker of this name; all workers if it is not among them."""
    return [worker for worker in workers if worker.name == name] or workers
