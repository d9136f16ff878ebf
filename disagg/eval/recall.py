"""Greedy answers: pass keys found again by length and depth, and how long an answer stays the same.

The wording is that of the default model's training (`training/rows.py`); digits stand apart.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

from disagg.errors import ConfigError
from disagg.eval.paged import EXACT, PagedKV, prefill
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer

Row = dict[str, Any]  # a JSON object

ANSWER_TOKENS = 10  # at most: five digits and what is before each
DEPTHS = (0.1, 0.5, 0.9)  # of the text before the question
PLACES = ("harbor", "garden", "mill", "tower", "castle", "school", "market", "chapel")


@dataclass(frozen=True)
class RecallCase:
    """A pass key in a prompt of `length` tokens, told at `depth` of it; one of several keys."""

    length: int
    depth: float
    key: int
    codec: str

    def __str__(self) -> str:
        return f"pass key {self.key + 1} in {self.length} tokens at {self.depth}, {self.codec}"


class Recall:
    """Pass keys in a text, asked for at its end, under exact KV and every codec.

    filler: tokens of a text that is about something else
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        filler: Sequence[int],
        lengths: Sequence[int],
        codecs: Sequence[str],
        keys: int,
    ):
        self._runner, self._tokenizer, self._filler = runner, tokenizer, filler
        self._every = [
            RecallCase(length, depth, key, codec)
            for length in lengths
            for depth in DEPTHS
            for key in range(keys)
            for codec in (EXACT, *codecs)
        ]
        self._prefill = lru_cache(maxsize=1)(
            partial(prefill, runner)
        )  # once for all codecs
        most = min(len(filler), runner.info.context_length - ANSWER_TOKENS)
        if lengths and not 200 <= min(lengths) <= max(lengths) <= most:
            raise ConfigError(f"pass keys in {lengths} tokens; 200 to {most} are known")

    def cases(self, done: Sequence[Row] = ()) -> list[RecallCase]:
        """What is left, all codecs of a prompt side by side."""
        known = {
            RecallCase(row["length"], row["depth"], row["key"], row["codec"])
            for row in done
        }
        return [x for x in self._every if x not in known]

    def measure(self, case: RecallCase) -> Row:
        """Whether every digit of the answer is right."""
        tokens, answer = self._passage(case)
        kv = PagedKV(self._runner, case.codec, self._prefill(tuple(tokens[:-1])))
        said = greedy(kv, tokens[-1], len(answer))
        return asdict(case) | {"right": said == answer}

    def _passage(self, case: RecallCase) -> tuple[list[int], list[int]]:
        """(prompt, answer): tokens."""
        source = random.Random(f"{case.length} {case.depth} {case.key}")
        place, key = source.choice(PLACES), " ".join(source.choices("0123456789", k=5))
        told = f"\n\nThe pass key for the {place} is {key}. Remember it: the {place} is {key}.\n\n"
        asked = (
            f"\n\nWhat is the pass key for the {place}? The pass key for the {place} is"
        )
        texts = told, asked, f"{asked} {key}"
        before, question, whole = (
            self._tokenizer.encode(x, special=False) for x in texts
        )
        room = case.length - len(before) - len(question)
        start, cut = (
            source.randrange(len(self._filler) - room + 1),
            int(case.depth * room),
        )
        filler = list(self._filler[start : start + room])
        return [*filler[:cut], *before, *filler[cut:], *question], whole[
            len(question) :
        ]


def greedy(kv: PagedKV, token: int, count: int) -> list[int]:
    """The most likely tokens behind one, each fed in turn."""
    said: list[int] = []
    for _ in range(count):
        token = int(kv.feed([token]).argmax())
        said.append(token)
    return said


def same_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many stand before the first difference."""
    pairs = enumerate(zip(a, b, strict=True))
    return next((i for i, (x, y) in pairs if x != y), len(a))


def summarize_recall(rows: Sequence[Row]) -> list[Row]:
    """One object for each codec: the percentage of right keys, by "length @ depth"."""
    lines: list[Row] = []
    for codec in dict.fromkeys(row["codec"] for row in rows):
        found: dict[str, list[bool]] = {}
        for row in rows:
            if row["codec"] == codec:
                place = f"{row['length']} @ {row['depth']}"
                found.setdefault(place, []).append(row["right"])
        shares = {place: round(100 * sum(x) / len(x)) for place, x in found.items()}
        lines.append({"codec": codec, **shares})
    return lines
