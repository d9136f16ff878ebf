"""Which workers are alive: from when their steps arrive, and what these say of the engine.

    no step for `silence_s` ──► SILENT: its requests go to others
    most workers silent at once: our own network ──► LINK_DOWN: open the streams again, no more;
                                                     after `lease_s` SILENT
    an engine that makes no progress for `stuck_s`, with a step that runs or sequences to decode
                            ──► STUCK: its requests go to others

Pure rules: the caller has the clock, and tells when its own loop was late, which is no silence.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from disagg.config import RouterConfig
from disagg.transfer.messages import Load

# workers whose last steps came within this time fell silent at once
AT_ONCE_S = 1.0
# a stall may last this many times as long as the longest one that ended
SLOW = 3.0
# two loads date the same progress with this error at most
JITTER_S = 0.25

Liveness = StrEnum("Liveness", ["ALIVE", "SILENT", "LINK_DOWN", "STUCK"])


@dataclass
class Pulse:
    """The signs of life of one worker.

    heard_at:        when its last step arrived
    step:            number of the engine step that runs or ran last; 0: unknown
    is_running:      whether that step runs
    progressed_at:   when the engine last made progress, or had nothing to do
    longest_stall_s: longest time without progress in a step that made some after it
    stuck_since:     when an engine that was found stuck last made progress; None: it goes on
    times_stuck:     how often it was stuck without working well in between
    """

    heard_at: float
    step: int = 0
    is_running: bool = False
    progressed_at: float = 0.0
    longest_stall_s: float = 0.0
    stuck_since: float | None = None
    times_stuck: int = 0

    @property
    def is_in_stuck_step(self) -> bool:
        """Whether the step that it was found stuck in still runs."""
        return self.stuck_since is not None and self.is_running

    def hear(self, load: Load, now: float) -> None:
        """A step has arrived."""
        is_running = load.stalled_s > 0
        progressed_at = now - load.stalled_s
        if is_running:
            has_progressed = progressed_at > self.progressed_at + JITTER_S
        else:
            has_progressed = load.step != self.step or self.is_running
        if has_progressed:
            self._progress(progressed_at)
        self.heard_at = now
        self.step = load.step
        self.is_running = is_running

    def _progress(self, at: float) -> None:
        if self.is_running:
            stalled_s = self.heard_at - self.progressed_at
            self.longest_stall_s = max(self.longest_stall_s, stalled_s)
        if self.stuck_since is None:
            self.times_stuck = 0
        self.stuck_since = None
        self.progressed_at = at

    def rest(self, now: float) -> None:
        """It has no sequences to decode: no step is missing, unless one runs."""
        if not self.is_running:
            self.progressed_at = now

    def delay(self, late_s: float) -> None:
        """Nothing could be heard in this time, as the router's loop was late."""
        self.heard_at += late_s
        self.progressed_at += late_s

    def is_stuck(self, stuck_s: float, now: float) -> bool:
        """Whether its engine hangs; where it has been slow, it may be so again."""
        limit_s = max(stuck_s, SLOW * self.longest_stall_s)
        return self.step > 0 and now - self.progressed_at >= limit_s

    def note_stuck(self) -> None:
        """It was found stuck."""
        self.stuck_since = self.progressed_at
        self.times_stuck += 1


def liveness_of(
    pulse: Pulse,
    pulses: Collection[Pulse],
    config: RouterConfig,
    lease_s: float,
    now: float,
) -> Liveness:
    """Whether a worker that takes part is alive.

    pulses:  of all workers that take part
    lease_s: how long workers keep their work for a router that they cannot reach
    """
    silent_s = now - pulse.heard_at
    if silent_s < config.silence_s:
        is_stuck = pulse.is_stuck(config.stuck_s, now)
        return Liveness.STUCK if is_stuck else Liveness.ALIVE
    heard_before = now - config.silence_s + AT_ONCE_S
    num_silent = sum(x.heard_at <= heard_before for x in pulses)
    are_most = num_silent > 1 and 2 * num_silent > len(pulses)
    return Liveness.LINK_DOWN if are_most and silent_s < lease_s else Liveness.SILENT
