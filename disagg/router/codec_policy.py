"""Which codec a request gets that leaves it to the service: a rule over facts. No clock.

    prefill worker  figures of a hand-off: errors of attention outputs under every listed codec, of
                    sampled prompts; bytes a second that its frames made ─► `Choices.learn`
    any worker      when it starts: bytes of prompts under every listed codec ─► `Started.sizes`
    decode worker   with every step: free bytes ─► `Load`
    Dispatch        when it binds a request to a pair: codec and reason ◄─ `Choices.choose`

The request keeps its codec for life, replays and moves included.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SPARE = (
    0.8  # of the time that is left: links are not as steady as the last hand-off says
)
MEMORY = 16  # prompts that an error is the mean of; then older ones fade


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
    """The most accurate one in the budget that has room and comes in time, and why it is that one.

    budget: of the error · free_bytes: at the decode worker · timely_bytes: that cross in time

    "accurate"    none that is in the budget is more accurate
    "room"        what is more accurate finds none · "deadline": or comes too late
    "late"        nothing comes in time: the fewest bytes
    "budget"      nothing is in the budget: the least error
    "unmeasured"  no error is known: the first that is listed
    """
    ranked = sorted(candidates, key=lambda x: (x.error, x.nbytes))
    if ranked[0].error == math.inf:
        return candidates[0], "unmeasured"
    allowed = [x for x in ranked if x.error <= budget]
    if not allowed:
        return ranked[0], "budget"
    least = min(allowed, key=lambda x: x.nbytes)
    roomy = [x for x in allowed if x.nbytes <= free_bytes] or [least]
    timely = [x for x in roomy if x.nbytes <= timely_bytes]
    if not timely:
        return least, "late"
    best = timely[0]
    return best, "accurate" if best is allowed[0] else "room" if best is roomy[
        0
    ] else "deadline"


@dataclass
class MeanError:
    """Of attention outputs under one codec, over sampled prompts; the last ones count most."""

    value: float = 0.0
    count: int = 0

    def add(self, error: float) -> None:
        self.count = min(MEMORY, self.count + 1)
        self.value += (error - self.value) / self.count


class CodecPolicy:
    """What is known of codecs and links, and what was chosen: (codec, reason) -> times."""

    def __init__(self) -> None:
        self.errors: dict[str, MeanError] = {}
        self.chosen: Counter[tuple[str, str]] = Counter()
        self._rates: dict[
            tuple[str, str], float
        ] = {}  # bytes a second, by prefill and decode

    def learn(self, stats: Mapping[str, Any], pair: tuple[str, str]) -> None:
        """Take in the figures of a hand-off; of a codec's layer groups the worst one counts."""
        for codec, errors in stats.get("attention_error", {}).items():
            if all(
                map(math.isfinite, errors)
            ):  # else outputs were no numbers, whatever the codec
                self.errors.setdefault(codec, MeanError()).add(max(errors))
        if rate := stats.get("link_bytes_per_s"):
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
        """Codec and reason for a prompt of these bytes by codec.

        left_s: until its first token shall be decoded · ahead_bytes: of others on the same link
        """
        known = {codec: x.value for codec, x in self.errors.items()}
        candidates = [
            Candidate(x, size, known.get(x, math.inf)) for x, size in sizes.items()
        ]
        rate = math.inf if pair[0] == pair[1] else self._rates.get(pair, math.inf)
        timely_bytes = (
            SPARE * rate * max(left_s, 0.0) - ahead_bytes if rate < math.inf else rate
        )
        best, reason = choose(candidates, budget, free_bytes, timely_bytes)
        self.chosen[best.codec, reason] += 1
        return best.codec, reason
