"""Which workers a request goes to, given the requests that every worker has now.

The best prefill worker is the one that would finish the prompt first: it has the fewest tokens to
compute, of the prompts before this one and of this one less what is in its prefix cache. The best
decode worker has the fewest sequences; holding pages of the prompt makes up for a few of them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from disagg.router.request_state import RequestState
from disagg.router.worker_state import WorkerState

# prompts that may be before this one at a prefill worker, if they take more than one step
MAX_PROMPTS_AHEAD = 3
# a decode worker that holds all pages of the prompt may have this many more sequences
AFFINITY = 4
# a prompt that has waited so long for room goes before smaller ones
PATIENCE_S = 5.0


class Placement:
    """The load of every worker while requests are placed, the most urgent first."""

    def __init__(
        self,
        requests: Iterable[RequestState],
        workers: Iterable[WorkerState],
        now: float,
    ):
        self._now = now
        self._workers = [worker for worker in workers if now >= worker.open_until]
        # prompts of this length or more are never served whole by a decode worker
        self._shortest_split = max(
            (x.info.min_tokens for x in self._workers if x.info.role.decodes),
            default=0,
        )
        # whether all prefill workers are busy with more urgent prompts than those that follow
        self._saturated = False
        # by worker: (urgency, tokens to compute) of each prompt, and the sum of the tokens
        self._prompts: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self._tokens_left: Counter[str] = Counter()
        # by worker: requests in any phase
        self._num_requests: Counter[str] = Counter()
        # names of workers that get no other request
        self._exclusive: set[str] = set()
        for request in requests:
            self.add(request)

    def add(self, request: RequestState) -> None:
        """Count a request at its workers."""
        names = request.workers
        if request.is_decoding:  # its prefill worker is done with it
            names = [x for x in names if x in (request.decode, request.target)]
        self._num_requests.update(names)
        if request.exclusive:
            self._exclusive.update(names)
        if request.prefill is not None and not request.prefill_done:
            tokens_left = len(request.job.prompt) - request.cached_tokens
            prompt = (request.urgency(self._now), tokens_left)
            self._prompts[request.prefill].append(prompt)
            self._tokens_left[request.prefill] += tokens_left

    def choose(
        self, request: RequestState, nbytes: float
    ) -> tuple[WorkerState, WorkerState] | None:
        """The prefill and the decode worker of a request; None if it has to wait.

        The same worker twice means local work. The pair that refused the request last is chosen
        only if there is no other. An exclusive request goes to the emptiest workers.
        """
        if self._is_saturated(request):
            return None
        prefills, decodes, served_whole = self._candidates(request)
        if not request.exclusive:
            prefills = self._starting_soon(request, prefills)
            if not prefills and not served_whole and not any(request.at):
                self._saturated = True
            prefills = self._with_room(request, nbytes, prefills)
            decodes = self._with_room(request, nbytes, decodes)
        if not prefills or not decodes:
            return None

        prefill = self._best_prefill(request, prefills)
        decode = prefill if prefill in decodes else self._best_decode(request, decodes)
        if request.exclusive and not self._claim(prefill, decode):
            return None
        return prefill, decode

    def choose_target(self, request: RequestState, nbytes: float) -> WorkerState | None:
        """The worker on which a sequence continues when its own stops decoding.

        None if there is none now. An exclusive request waits for an empty worker, which accepts
        no other request meanwhile.
        """
        workers = [
            worker
            for worker in self._workers
            if worker.info.role.decodes and worker.name not in self._exclusive
        ]
        workers = self._with_room(request, nbytes, workers)
        if not workers:
            return None

        def cost(worker: WorkerState) -> tuple[bool, int, int]:
            has_refused = worker.name in request.avoid
            num_requests = self._num_requests[worker.name]
            return has_refused, num_requests, -worker.load.free_bytes

        target = min(workers, key=cost)
        if request.exclusive and not self._claim(target):
            return None
        self._num_requests[target.name] += 1
        return target

    def _is_saturated(self, request: RequestState) -> bool:
        """Whether no prefill worker would begin this prompt soon, as an earlier one has shown."""
        if any(request.at) or request.exclusive:
            return False
        return self._saturated and len(request.job.prompt) >= self._shortest_split

    def _candidates(
        self, request: RequestState
    ) -> tuple[list[WorkerState], list[WorkerState], bool]:
        """Workers that may prefill and decode a request, and whether it is too short to split."""
        prefill_name, decode_name = request.at
        workers = [x for x in self._workers if x.name not in self._exclusive]
        prefills = _named(prefill_name, [x for x in workers if x.info.role.prefills])
        decodes = _named(decode_name, [x for x in workers if x.info.role.decodes])
        if not any(request.at):
            tokens = len(request.job.prompt)
            whole = [x for x in decodes if tokens < x.info.min_tokens]
            if whole:
                return whole, whole, True
        if request.is_single_token:
            return prefills, prefills, False
        return prefills, decodes, False

    def _starting_soon(
        self, request: RequestState, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """The workers that would compute only few prompts before this one."""
        urgency = request.urgency(self._now)

        def starts_soon(worker: WorkerState) -> bool:
            tokens_ahead = [
                tokens_left
                for other_urgency, tokens_left in self._prompts[worker.name]
                if other_urgency <= urgency
            ]
            if len(tokens_ahead) < MAX_PROMPTS_AHEAD:
                return True
            return sum(tokens_ahead) < worker.info.step_tokens

        return [worker for worker in workers if starts_soon(worker)]

    def _with_room(
        self, request: RequestState, nbytes: float, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """The workers that may have room; an empty worker has room for any request.

        If none has, and the request has waited long, the one with the most room accepts nothing
        else until it can serve this one.
        """

        def has_room(worker: WorkerState) -> bool:
            is_empty = not self._num_requests[worker.name]
            required_bytes = 0 if is_empty else nbytes
            return worker.may_fit(len(request.job.prompt), required_bytes, self._now)

        roomy = [worker for worker in workers if has_room(worker)]
        waited_s = self._now - request.arrived
        if workers and not roomy and waited_s >= PATIENCE_S:
            roomiest = max(workers, key=lambda x: x.load.free_bytes)
            self._exclusive.add(roomiest.name)
        return roomy

    def _best_prefill(
        self, request: RequestState, workers: list[WorkerState]
    ) -> WorkerState:
        """The worker with the fewest tokens to compute until this prompt is done."""

        def cost(worker: WorkerState) -> tuple[bool, int, int, float]:
            has_refused = worker.name in request.avoid
            num_requests = self._num_requests[worker.name] if request.exclusive else 0
            cached_tokens = worker.prefixes.tokens(request.prompt_keys)
            tokens_left = self._tokens_left[worker.name] - cached_tokens
            return has_refused, num_requests, tokens_left, worker.recent_tokens

        return min(workers, key=cost)

    def _best_decode(
        self, request: RequestState, workers: list[WorkerState]
    ) -> WorkerState:
        """The worker with the fewest sequences, after credit for pages that it holds already."""

        def cost(worker: WorkerState) -> tuple[bool, float, int]:
            has_refused = worker.name in request.avoid
            cached_tokens = worker.prefixes.tokens(request.page_keys)
            affinity = AFFINITY * cached_tokens / len(request.job.prompt)
            num_requests = self._num_requests[worker.name] - affinity
            return has_refused, num_requests, -worker.load.free_bytes

        return min(workers, key=cost)

    def _claim(self, *workers: WorkerState) -> bool:
        """Give workers no other request from now on; whether all of them are empty already."""
        self._exclusive.update(worker.name for worker in workers)
        return not any(self._num_requests[worker.name] for worker in workers)


def _named(name: str, workers: list[WorkerState]) -> list[WorkerState]:
    """The worker of this name; all workers if it is not among them."""
    return [worker for worker in workers if worker.name == name] or workers
