"""What a load client asks: random prompts, a ShareGPT file, or the traces of Azure and Mooncake.

As `vllm bench serve` makes them, with the same seed the same lengths. It knows no server.

    random      so many tokens, consecutive ones of the vocabulary from a random one on
    sharegpt    JSON: [{"conversations": [{"value": prompt}, {"value": answer}]}]
    azure       CSV: TIMESTAMP,ContextTokens,GeneratedTokens; random prompts of these lengths
    mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids; what has the same
                hash is the same text, so that prefixes are shared as in the trace
"""

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from disagg.errors import ConfigError
from disagg.model.tokenizer import Tokenizer

MOONCAKE_TOKENS = 512  # of a hash
MAX_REFITS = 10
LEAST_TOKENS, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048  # of what is taken from ShareGPT


@dataclass(frozen=True)
class Visit:
    """One request. `at_s`: when the trace has it, seconds from its first one."""

    prompt: str
    prompt_tokens: int
    max_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True)
class WorkloadOptions:
    """Which requests, and how many; `path` is of the file, lengths and spread are of "random"."""

    dataset: str = "random"
    path: Path | None = None
    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    seed: int = 0


def make_visits(options: WorkloadOptions, tokenizer: Tokenizer) -> list[Visit]:
    """The requests, in order; ConfigError for a data set nobody knows or a file without any."""
    if options.dataset not in MAKERS:
        raise ConfigError(f"data set {options.dataset!r}; known: {', '.join(MAKERS)}")
    if options.dataset != "random" and options.path is None:
        raise ConfigError(f"data set {options.dataset} wants --dataset-path FILE")
    made = MAKERS[options.dataset](options, Prompts(tokenizer, options.seed))
    try:
        visits = list(islice(made, options.num_prompts))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        told = f"{options.path} is no file of {options.dataset}"
        raise ConfigError(f"{told}: {type(error).__name__} {error}") from error
    if not visits:
        raise ConfigError(f"{options.path} has no request that can be asked")
    return visits


class Prompts:
    """Texts of as many tokens as wanted, with one stream of random numbers."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.tokenizer = tokenizer
        self.rng = np.random.default_rng(seed)
        special = tokenizer.special_ids
        self.allowed = np.array([x for x in range(tokenizer.size) if x not in special])

    def walk(self, start: int, length: int) -> list[int]:
        """Consecutive tokens of those allowed."""
        found: list[int] = self.allowed[(start + np.arange(length)) % len(self.allowed)].tolist()
        return found

    def draw(self, count: int) -> list[int]:
        """Random tokens."""
        found: list[int] = self.rng.integers(0, self.tokenizer.size, size=count).tolist()
        return found

    def fit(self, ids: Sequence[int], length: int) -> tuple[str, int]:
        """A text whose tokens are these, cut or filled up to `length`; and how many it has: text
        that was made of tokens may have others, so that a few more or less may remain."""
        tokens = list(ids)
        for _ in range(MAX_REFITS):
            text = self.tokenizer.decode(tokens, special=True)
            tokens = self.tokenizer.encode(text, special=False)
            if len(tokens) == length:
                break
            tokens = (tokens + self.draw(max(0, length - len(tokens))))[:length]
        else:
            text = self.tokenizer.decode(tokens, special=True)
            tokens = self.tokenizer.encode(text, special=False)
        return text, len(tokens)


def _random(options: WorkloadOptions, prompts: Prompts) -> Iterator[Visit]:
    size, ratio = (options.num_prompts,), options.range_ratio
    inputs, outputs = (
        prompts.rng.integers(
            max(1, int(length * (1 - ratio))), -int(-length * (1 + ratio)) + 1, size=size
        )
        for length in (options.input_len, options.output_len)
    )
    starts = prompts.rng.integers(0, prompts.tokenizer.size, size=size)
    shared = prompts.draw(options.prefix_len)
    for number, (start, length) in enumerate(zip(starts, inputs, strict=True)):
        ids = shared + prompts.walk(int(start) + number, int(length))
        yield Visit(*prompts.fit(ids, len(ids)), int(outputs[number]))


def _sharegpt(options: WorkloadOptions, prompts: Prompts) -> Iterator[Visit]:
    talks = [x["conversations"] for x in _json_file(options) if len(x.get("conversations", ())) > 1]
    random.Random(options.seed).shuffle(talks)
    for prompt, answer in ((talk[0]["value"], talk[1]["value"]) for talk in talks):
        asked, said = (len(prompts.tokenizer.encode(text)) for text in (prompt, answer))
        if min(asked, said) >= LEAST_TOKENS and asked <= MOST_PROMPT and asked + said <= MOST_TOTAL:
            yield Visit(prompt, asked, said)


def _azure(options: WorkloadOptions, prompts: Prompts) -> Iterator[Visit]:
    first = None
    for row in csv.DictReader(_lines(options)):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        first = first or at
        length = int(row["ContextTokens"])
        start = int(prompts.rng.integers(0, prompts.tokenizer.size))
        text = prompts.fit(prompts.walk(start, length), length)
        yield Visit(*text, int(row["GeneratedTokens"]), (at - first).total_seconds())


def _mooncake(options: WorkloadOptions, prompts: Prompts) -> Iterator[Visit]:
    first = None
    for row in map(json.loads, _lines(options)):
        first = row["timestamp"] if first is None else first
        ids: list[int] = []
        for number in row["hash_ids"]:
            rng = np.random.default_rng([options.seed, number])
            ids += prompts.allowed[rng.integers(0, len(prompts.allowed), MOONCAKE_TOKENS)].tolist()
        length = row["input_length"]
        text = prompts.fit(ids[:length], length)
        yield Visit(*text, row["output_length"], (row["timestamp"] - first) / 1e3)


def _lines(options: WorkloadOptions) -> Iterable[str]:
    assert options.path is not None
    return options.path.read_text().splitlines()


def _json_file(options: WorkloadOptions) -> list[dict[str, Any]]:
    assert options.path is not None
    found: list[dict[str, Any]] = json.loads(options.path.read_text())
    return found


MAKERS: dict[str, Callable[[WorkloadOptions, Prompts], Iterator[Visit]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "azure": _azure,
    "mooncake": _mooncake,
}
