"""Greedy answers: pass keys recalled by length and depth, and how long answers stay the same.

The wording is that of the default model's training (`training/rows.py`), digits apart by blanks.
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

ANSWER_TOKENS = 10  # at most: five digits and a blank before each
DEPTHS = (0.1, 0.5, 0.9)  # of the text before the question
PLACES = ("harbor", "garden", "mill", "tower", "castle", "school", "market", "chapel")


@dataclass(frozen=True)
class RecallCase:
    """A pass key in a prompt of `length` tokens, stated at `depth` of it; one of several keys."""

    length: int
    depth: float
    key: int
    codec: str

    def __str__(self) -> str:
        return f"pass key {self.key + 1} in {self.length} tokens at {self.depth}, {self.codec}"


class Recall:
    """Pass keys in a text, asked for at its end, under exact KV and every codec.

    filler: tokens of a text about something else
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
        self._runner = runner
        self._tokenizer = tokenizer
        self._filler = filler
        self._all_cases = [
            RecallCase(length, depth, key, codec)
            for length in lengths
            for depth in DEPTHS
            for key in range(keys)
            for codec in (EXACT, *codecs)
        ]
        # cached: once for all codecs
        self._prefill = lru_cache(maxsize=1)(partial(prefill, runner))
        most = min(len(filler), runner.info.context_length - ANSWER_TOKENS)
        if lengths and not 200 <= min(lengths) <= max(lengths) <= most:
            raise ConfigError(f"pass keys in {lengths} tokens; 200 to {most} are known")

    def cases(self, done: Sequence[Row] = ()) -> list[RecallCase]:
        """The cases left to measure, all codecs of a prompt side by side."""
        measured = {
            RecallCase(row["length"], row["depth"], row["key"], row["codec"])
            for row in done
        }
        return [case for case in self._all_cases if case not in measured]

    def measure(self, case: RecallCase) -> Row:
        """Whether every digit of the answer is right."""
        tokens, answer = self._passage(case)
        kv = PagedKV(self._runner, case.codec, self._prefill(tuple(tokens[:-1])))
        tokens_of_codec = greedy(kv, tokens[-1], len(answer))
        return {**asdict(case), "right": tokens_of_codec == answer}

    def _passage(self, case: RecallCase) -> tuple[list[int], list[int]]:
        """(prompt, answer): tokens."""
        rng = random.Random(f"{case.length} {case.depth} {case.key}")
        place = rng.choice(PLACES)
        key = " ".join(rng.choices("0123456789", k=5))
        statement_text = (
            f"\n\nThe pass key for the {place} is {key}. "
            f"Remember it: the {place} is {key}.\n\n"
        )
        question_text = (
            f"\n\nWhat is the pass key for the {place}? The pass key for the {place} is"
        )
        statement = self._tokenizer.encode(statement_text, special=False)
        question = self._tokenizer.encode(question_text, special=False)
        answered = self._tokenizer.encode(f"{question_text} {key}", special=False)
        room = case.length - len(statement) - len(question)
        start = rng.randrange(len(self._filler) - room + 1)
        filler = list(self._filler[start : start + room])
        cut = int(case.depth * room)
        prompt = [*filler[:cut], *statement, *filler[cut:], *question]
        return prompt, answered[len(question) :]


def greedy(kv: PagedKV, token: int, count: int) -> list[int]:
    """`count` greedy tokens after a first one, each fed in turn."""
    tokens: list[int] = []
    for _ in range(count):
        token = int(kv.feed([token]).argmax())
        tokens.append(token)
    return tokens


def same_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many equal tokens come before the first difference."""
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y:
            return i
    return len(a)


def summarize_recall(rows: Sequence[Row]) -> list[Row]:
    """One object for each codec: the percentage of right keys, by "length @ depth"."""
    lines: list[Row] = []
    for codec in dict.fromkeys(row["codec"] for row in rows):
        by_place: dict[str, list[bool]] = {}
        for row in rows:
            if row["codec"] == codec:
                place = f"{row['length']} @ {row['depth']}"
                by_place.setdefault(place, []).append(row["right"])
        percents = {
            place: round(100 * sum(right) / len(right))
            for place, right in by_place.items()
        }
        lines.append({"codec": codec, **percents})
    return lines
