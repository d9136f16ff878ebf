"""How an engine gets on with its steps, so that other threads see where it stands still."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from disagg.engine.scheduler import ScheduledTokens

LISTED = 8  # sequences of a step that are named


class StepProgress:
    """The running step of an engine. One thread steps; any thread may read.

    num_steps: begun so far
    scheduled: what the running step computes
    """

    def __init__(self, clock: Callable[[], float]):
        self.num_steps = 0
        self.scheduled: Sequence[ScheduledTokens] = ()
        self._clock = clock
        self._progressed_at: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The engine works until the end of the block."""
        self.advance()
        try:
            yield
        finally:
            self._progressed_at = None
            self.scheduled = ()

    def advance(self) -> None:
        """The running step got on."""
        self._progressed_at = self._clock()

    @property
    def stalled_s(self) -> float:
        """Seconds since the running step got on; 0 while none runs."""
        progressed_at = self._progressed_at
        return 0.0 if progressed_at is None else self._clock() - progressed_at

    @property
    def contents(self) -> str:
        """The sequences of the running step, each with its tokens, in words."""
        scheduled = self.scheduled
        if not scheduled:
            return "no sequences"
        names = [f"{x.sequence.rid} ({_tokens_of(x)})" for x in scheduled[:LISTED]]
        num_tokens = sum(x.count for x in scheduled)
        unnamed = len(scheduled) - len(names)
        more = f" and {unnamed} more" if unnamed else ""
        total = f"{num_tokens} tokens of {len(scheduled)} sequences"
        return f"{total}: {', '.join(names)}{more}"


def _tokens_of(entry: ScheduledTokens) -> str:
    sequence = entry.sequence
    return f"{entry.count} from {sequence.n}, {sequence.status}"
