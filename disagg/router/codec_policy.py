"""Which codec the service chooses for a request with codec "auto". Pure rules, no clock.

    prefill worker  figures of a hand-off: errors of attention outputs under every listed codec, for
                    sampled prompts; speed of the link ─► `CodecPolicy.learn`
    any worker      at its start: bytes of prompts under every listed codec ─► `WorkerInfo.sizes`
    decode worker   with every step: free bytes ─► `Load`
    RequestTable    when it sends a request to a pair: codec and reason ◄─ `CodecPolicy.choose`

A request keeps its codec in replays and moves.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# share of the remaining time that a hand-off may take: links are slower at times
TIME_SHARE = 0.8
# an error is the mean of this many prompts; after that, older ones fade
MEMORY = 16


@dataclass(frozen=True)
class Candidate:
    """A listed codec: bytes of a prompt, and the relative error of attention outputs, if known."""

    codec: str
    nbytes: float
    error: float = math.inf


def choose(
    candidates: Sequence[Candidate],
    budget: float,
    free_bytes: float,
    timely_bytes: float,
) -> tuple[Candidate, str]:
    """The most accurate codec whose pages fit and arrive in time, and the reason of the choice.

    budget:       largest acceptable error
    free_bytes:   room at the decode worker
    timely_bytes: bytes that the link can carry in time

    "accurate"    no codec within the budget is more accurate
    "room"        more accurate ones do not fit
    "deadline"    more accurate ones fit, but arrive too late
    "late"        none arrives in time: the one with the fewest bytes
    "budget"      none is within the budget: the one with the least error
    "unmeasured"  no error is known: the first listed
    """
    ranked = sorted(candidates, key=lambda x: (x.error, x.nbytes))
    if ranked[0].error == math.inf:
        return candidates[0], "unmeasured"
    allowed = [x for x in ranked if x.error <= budget]
    if not allowed:
        return ranked[0], "budget"
    smallest = min(allowed, key=lambda x: x.nbytes)
    roomy = [x for x in allowed if x.nbytes <= free_bytes] or [smallest]
    timely = [x for x in roomy if x.nbytes <= timely_bytes]
    if not timely:
        return smallest, "late"
    best = timely[0]
    return best, _reason_of(best, allowed, roomy)


def _reason_of(
    best: Candidate, allowed: Sequence[Candidate], roomy: Sequence[Candidate]
) -> str:
    if best is allowed[0]:
        return "accurate"
    return "room" if best is roomy[0] else "deadline"


@dataclass
class MeanError:
    """Mean error of attention outputs under one codec; the latest prompts count most."""

    value: float = 0.0
    count: int = 0

    def add(self, error: float) -> None:
        self.count = min(MEMORY, self.count + 1)
        self.value += (error - self.value) / self.count


class CodecPolicy:
    """Errors of codecs, speeds of links, and the choices so far.

    chosen: times by (codec, reason)
    """

    def __init__(self) -> None:
        self.errors: dict[str, MeanError] = {}
        self.chosen: Counter[tuple[str, str]] = Counter()
        # bytes a second, by the names of a prefill and a decode worker
        self._rates: dict[tuple[str, str], float] = {}

    def learn(self, stats: Mapping[str, Any], pair: tuple[str, str]) -> None:
        """Take in the figures of a hand-off. A codec's error is that of its worst layer group."""
        for codec, errors in stats.get("attention_error", {}).items():
            # not finite: the model's own outputs were no numbers, whatever the codec
            if all(map(math.isfinite, errors)):
                self.errors.setdefault(codec, MeanError()).add(max(errors))
        rate = stats.get("link_bytes_per_s")
        if rate:
            self._rates[pair] = rate

    def choose(
        self,
        sizes: Mapping[str, float],
        budget: float,
        free_bytes: float,
        pair: tuple[str, str],
        left_s: float,
        ahead_bytes: float,
    ) -> tuple[str, str]:
        """Codec and reason for a prompt.

        sizes:       bytes of the prompt under each codec
        left_s:      time until its first token is to be decoded
        ahead_bytes: of other requests on the same link
        """
        candidates = []
        for codec, nbytes in sizes.items():
            mean = self.errors.get(codec)
            error = math.inf if mean is None else mean.value
            candidates.append(Candidate(codec, nbytes, error))
        timely_bytes = self._timely_bytes(pair, left_s, ahead_bytes)
        best, reason = choose(candidates, budget, free_bytes, timely_bytes)
        self.chosen[best.codec, reason] += 1
        return best.codec, reason

    def _timely_bytes(
        self, pair: tuple[str, str], left_s: float, ahead_bytes: float
    ) -> float:
        """Bytes that still arrive in time; no limit on one worker or an unmeasured link."""
        prefill, decode = pair
        if prefill == decode or pair not in self._rates:
            return math.inf
        rate = self._rates[pair]
        if rate == math.inf:
            return math.inf
        return TIME_SHARE * rate * max(left_s, 0.0) - ahead_bytes
