"""Which codec the service chooses for a request with codec "auto". Pure rules, no clock.

    prefill worker  figures of a hand-off: errors of attention outputs under every listed codec, for
                    sampled prompts; speed of the link ─► `CodecPolicy.learn`
    any worker      at its start: bytes of prompts under every listed codec, in the arena and on the
                    link ─► `WorkerInfo`
    decode worker   with every step: free bytes ─► `Load`
    RequestTable    when it sends a request to a pair: codec and reason ◄─ `CodecPolicy.choose`

A request keeps its codec in replays and moves.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

# share of the remaining time that a hand-off may take: links are slower at times
TIME_SHARE = 0.8
# the error of a layer is the mean of this many samples of it; after that, older ones fade
MEMORY = 4
# the error of one layer may be this many times the budget for the mean; with 1, noise would decide.
# For codecs that serve a model well, the worst layer has up to 3.4 times the mean error, but stays
# below 0.25; where outlier channels ruin a codec, its worst layer has 0.4 or more
WORST_LAYER = 2.0


@dataclass(frozen=True)
class Candidate:
    """A listed codec: bytes of a prompt, and the `value` of its `CodecError`, if there is one.

    nbytes:     in the arena
    wire_bytes: on the link; None: as many
    """

    codec: str
    nbytes: float
    error: float = math.inf
    wire_bytes: float | None = None

    @property
    def link_bytes(self) -> float:
        """Bytes on the link."""
        return self.nbytes if self.wire_bytes is None else self.wire_bytes


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
    timely = [x for x in roomy if x.link_bytes <= timely_bytes]
    if not timely:
        return min(roomy, key=lambda x: x.link_bytes), "late"
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
    """Mean error of attention outputs in one layer; the latest samples count most."""

    value: float = 0.0
    count: int = 0

    def add(self, error: float) -> None:
        self.count = min(MEMORY, self.count + 1)
        self.value += (error - self.value) / self.count


class CodecError:
    """Errors of attention outputs under one codec, layer by layer.

    A few ruined layers ruin the answers but hardly change the mean of many, so both count.
    """

    def __init__(self) -> None:
        self._groups: dict[int, dict[str, MeanError]] = {}  # by layer group and layer

    def add(self, errors: Sequence[Mapping[str, float]]) -> None:
        """Take in a sample: by layer group, the errors of some layers."""
        for index, group in enumerate(errors):
            layers = self._groups.setdefault(index, {})
            for layer, error in group.items():
                layers.setdefault(layer, MeanError()).add(error)

    @property
    def mean(self) -> float:
        """The mean error over the layers of the worst layer group."""
        means = [fmean(group) for group in self._by_group()]
        return max(means, default=0.0)

    @property
    def worst(self) -> float:
        """The error of the worst layer."""
        return max(map(max, self._by_group()), default=0.0)

    @property
    def value(self) -> float:
        """What the budget limits: the mean, or the worst layer / `WORST_LAYER` if that is more."""
        return max(self.mean, self.worst / WORST_LAYER)

    def _by_group(self) -> list[list[float]]:
        """The errors of the sampled layers of each group that has any."""
        return [
            [error.value for error in layers.values()]
            for layers in self._groups.values()
            if layers
        ]


class CodecPolicy:
    """Errors of codecs, speeds of links, and the choices so far.

    chosen: times by (codec, reason)
    """

    def __init__(self) -> None:
        self.errors: dict[str, CodecError] = {}
        self.chosen: Counter[tuple[str, str]] = Counter()
        # bytes a second, by the names of a prefill and a decode worker
        self._rates: dict[tuple[str, str], float] = {}

    def learn(self, stats: Mapping[str, Any], pair: tuple[str, str]) -> None:
        """Take in the figures of a hand-off."""
        for codec, errors in stats.get("attention_error", {}).items():
            figures = [error for group in errors for error in group.values()]
            # not finite: the model's own outputs were no numbers, whatever the codec
            if all(map(math.isfinite, figures)):
                self.errors.setdefault(codec, CodecError()).add(errors)
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
        wire_sizes: Mapping[str, float] | None = None,
    ) -> tuple[str, str]:
        """Codec and reason for a prompt.

        sizes:       bytes of the prompt in the arena under each codec
        left_s:      time until its first token is to be decoded
        ahead_bytes: of other requests on the same link
        wire_sizes:  bytes of the prompt on the link; None: those in the arena
        """
        candidates = []
        for codec, nbytes in sizes.items():
            measured = self.errors.get(codec)
            error = math.inf if measured is None else measured.value
            wire_bytes = (wire_sizes or sizes)[codec]
            candidates.append(Candidate(codec, nbytes, error, wire_bytes))
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
