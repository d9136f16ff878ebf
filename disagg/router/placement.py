"""Which workers a request goes to: the rule, over who is where while requests are placed.

A prefill worker is the better the fewer tokens it has to compute until this prompt is done: those
before it, and those of the prompt that it does not know. A decode worker is the better the fewer
sequences live there; to have pages of the prompt counts for some of them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from disagg.router.worker_state import WorkerState

if TYPE_CHECKING:
    from disagg.router.requests import RequestState

AHEAD = (
    3  # more urgent prompts at a prefill worker, or what it computes in one step anyway
)
AFFINITY = (
    4  # sequences that a decode worker may have more if it has all pages of a prompt
)
PATIENCE_S = (
    5.0  # a prompt that found no room for so long is let in before smaller ones
)


class Placement:
    """Who is where, while requests are placed, the most urgent first."""

    def __init__(
        self,
        entries: Iterable["RequestState"],
        members: Iterable[WorkerState],
        now: float,
    ):
        self._saturated = (
            False  # prefill workers have enough to do before all that follows
        )
        self._now = now
        self._members = [member for member in members if now >= member.open_until]
        splits = (x.started.min_tokens for x in self._members if x.started.role.decodes)
        self._shortest_split = max(
            splits, default=0
        )  # no worker serves such a prompt whole
        # prompts, by urgency and the tokens to compute; and all their tokens
        self._ahead: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self._left: Counter[str] = Counter()
        self._lives: Counter[str] = Counter()  # requests, in whatever phase
        self._kept: set[str] = set()  # workers that get nothing else
        for entry in entries:
            self.add(entry)

    def add(self, entry: "RequestState") -> None:
        """A request is at its workers."""
        there = entry.workers
        if entry.decodes:  # its prefill worker has nothing of it any more
            there = [x for x in there if x in (entry.decode, entry.target)]
        self._lives.update(there)
        if entry.alone:
            self._kept.update(there)
        if entry.prefill is not None and not entry.computed:
            left = len(entry.job.prompt) - entry.cached
            self._ahead[entry.prefill].append((entry.urgency(self._now), left))
            self._left[entry.prefill] += left

    def choose(
        self, entry: "RequestState", nbytes: float
    ) -> "tuple[WorkerState, WorkerState] | None":
        """The pair for a request, one worker twice for local work; None: it has to wait.

        Not the pair that refused it last, if there is another; to run alone, the emptiest.
        """
        tokens, anywhere = len(entry.job.prompt), not any(entry.at)
        if (
            self._saturated
            and anywhere
            and not entry.alone
            and tokens >= self._shortest_split
        ):
            return None
        free = [x for x in self._members if x.name not in self._kept]
        prefills = _named(entry.at[0], [x for x in free if x.started.role.prefills])
        decodes = _named(entry.at[1], [x for x in free if x.started.role.decodes])
        if whole := [x for x in decodes if anywhere and tokens < x.started.min_tokens]:
            prefills = decodes = whole
        elif entry.single:
            decodes = prefills
        if not entry.alone:
            prefills = [x for x in prefills if self._starts_soon(entry, x)]
            self._saturated |= anywhere and not prefills and not whole
            prefills = self._fitting(entry, nbytes, prefills)
            decodes = self._fitting(entry, nbytes, decodes)
        if not prefills or not decodes:
            return None
        avoid, lives, left = entry.avoid, self._lives, self._left
        busy = lives if entry.alone else Counter[str]()
        work = {x.name: left[x.name] - x.known.tokens(entry.exact) for x in prefills}
        first = second = min(
            prefills,
            key=lambda x: (x.name in avoid, busy[x.name], work[x.name], x.recent),
        )
        if first not in decodes:
            worth = {
                x.name: AFFINITY * x.known.tokens(entry.pages) / tokens for x in decodes
            }
            second = min(
                decodes,
                key=lambda x: (
                    x.name in avoid,
                    lives[x.name] - worth[x.name],
                    -x.load.free_bytes,
                ),
            )
        if entry.alone:
            self._kept |= {first.name, second.name}
        return None if busy[first.name] or busy[second.name] else (first, second)

    def successor(self, entry: "RequestState", nbytes: float) -> "WorkerState | None":
        """Where a sequence whose worker decodes no longer can go on; None: nowhere now.

        One that runs alone waits for a worker where nobody is, to which nothing else goes then.
        """
        there = [
            x
            for x in self._members
            if x.name not in self._kept and x.started.role.decodes
        ]
        found = self._fitting(entry, nbytes, there)
        best = min(
            found,
            key=lambda x: (
                x.name in entry.avoid,
                self._lives[x.name],
                -x.load.free_bytes,
            ),
            default=None,
        )
        if best is None:
            return None
        busy = entry.alone and self._lives[best.name]
        self._kept |= {best.name} if entry.alone else set()
        self._lives[best.name] += not busy
        return None if busy else best

    def _starts_soon(self, entry: "RequestState", member: WorkerState) -> bool:
        """Whether few enough prompts are to be computed before this one."""
        key = entry.urgency(self._now)
        before = [left for urgency, left in self._ahead[member.name] if urgency <= key]
        return len(before) < AHEAD or sum(before) < member.started.step_tokens

    def _fitting(
        self, entry: "RequestState", nbytes: float, members: list[WorkerState]
    ) -> list[WorkerState]:
        """Those that may have room, or are idle. If none has, one is kept after some patience."""
        tokens, now = len(entry.job.prompt), self._now
        found = [
            x
            for x in members
            if x.takes(tokens, nbytes * bool(self._lives[x.name]), now)
        ]
        if members and not found and now - entry.arrived >= PATIENCE_S:
            self._kept.add(max(members, key=lambda x: x.load.free_bytes).name)
        return found


def _named(name: str, members: list[WorkerState]) -> list[WorkerState]:
    """The one of this name; all where it is not among them."""
    return [x for x in members if x.name == name] or members
