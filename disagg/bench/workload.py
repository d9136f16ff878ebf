"""The requests of `disagg bench serve`, as `vllm bench serve` makes them: same seed, same lengths.

random      consecutive tokens of the vocabulary, from a random one on
sharegpt    JSON: [{"conversations": [{"value": prompt}, {"value": answer}]}]
azure       CSV: TIMESTAMP,ContextTokens,GeneratedTokens; random prompts with these lengths
mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids; equal hashes are
            equal text, so that prefixes are shared as in the trace
"""

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np

from disagg.errors import ConfigError
from disagg.model.tokenizer import Tokenizer

MOONCAKE_TOKENS = 512  # of a hash
MAX_REFITS = 10
# of what is used from ShareGPT: tokens of a prompt and of an answer, of a prompt, of both
LEAST_TOKENS = 4
MOST_PROMPT = 1024
MOST_TOTAL = 2048
TIMESTAMP_CHARS = 26  # of Azure's, up to microseconds


@dataclass(frozen=True)
class LoadRequest:
    """One request. `at_s`: seconds from the first one of the trace."""

    prompt: str
    prompt_tokens: int
    max_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True)
class WorkloadOptions:
    """The requests; `path`: of the data set's file; lengths and spread: for "random"."""

    dataset: str = "random"
    path: Path | None = None
    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    seed: int = 0


def make_requests(options: WorkloadOptions, tokenizer: Tokenizer) -> list[LoadRequest]:
    """The requests, in order; ConfigError if the file has none."""
    if options.dataset != "random" and options.path is None:
        raise ConfigError(f"data set {options.dataset} wants --dataset-path FILE")
    dataset = DATASETS[options.dataset](options, PromptMaker(tokenizer, options.seed))
    try:
        requests = list(islice(dataset, options.num_prompts))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{options.path} is not a {options.dataset} file: "
            f"{type(error).__name__} {error}"
        ) from error
    if not requests:
        raise ConfigError(f"{options.path} has no request that can be asked")
    return requests


class PromptMaker:
    """Makes texts of a chosen number of tokens, with one stream of random numbers."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.tokenizer = tokenizer
        self.rng = np.random.default_rng(seed)
        special = tokenizer.special_ids
        self.allowed = np.array([x for x in range(tokenizer.size) if x not in special])

    def walk(self, start: int, length: int) -> list[int]:
        """Consecutive tokens of those allowed."""
        positions = (start + np.arange(length)) % len(self.allowed)
        tokens: list[int] = self.allowed[positions].tolist()
        return tokens

    def draw(self, count: int) -> list[int]:
        """Random tokens."""
        tokens: list[int] = self.rng.integers(
            0, self.tokenizer.size, size=count
        ).tolist()
        return tokens

    def draw_start(self) -> int:
        """A random position of the vocabulary."""
        return int(self.rng.integers(0, self.tokenizer.size))

    def fit(self, ids: Sequence[int], length: int) -> tuple[str, int]:
        """A text of these tokens, cut or filled up to `length`, and its number of tokens.

        That may differ a little from `length`, because decoded text may be tokenised differently.
        """
        tokens = list(ids)
        for refits in range(MAX_REFITS + 1):
            text = self.tokenizer.decode(tokens, special=True)
            tokens = self.tokenizer.encode(text, special=False)
            if len(tokens) == length or refits == MAX_REFITS:
                break
            missing = max(0, length - len(tokens))
            tokens = (tokens + self.draw(missing))[:length]
        return text, len(tokens)


def _random(options: WorkloadOptions, maker: PromptMaker) -> Iterator[LoadRequest]:
    def draw_lengths(mean: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        least = max(1, int(mean * (1 - options.range_ratio)))
        most = -int(-mean * (1 + options.range_ratio))
        return maker.rng.integers(least, most + 1, size=(options.num_prompts,))

    inputs = draw_lengths(options.input_len)
    outputs = draw_lengths(options.output_len)
    starts = maker.rng.integers(0, maker.tokenizer.size, size=(options.num_prompts,))
    prefix = maker.draw(options.prefix_len)
    for number in range(options.num_prompts):
        start = int(starts[number]) + number
        ids = prefix + maker.walk(start, int(inputs[number]))
        prompt, prompt_tokens = maker.fit(ids, len(ids))
        yield LoadRequest(prompt, prompt_tokens, int(outputs[number]))


def _sharegpt(options: WorkloadOptions, maker: PromptMaker) -> Iterator[LoadRequest]:
    conversations = []
    for entry in json.loads(_text(options)):
        turns = entry.get("conversations", ())
        if len(turns) > 1:
            conversations.append(turns)
    random.Random(options.seed).shuffle(conversations)
    for turns in conversations:
        prompt, answer = turns[0]["value"], turns[1]["value"]
        prompt_tokens = len(maker.tokenizer.encode(prompt))
        answer_tokens = len(maker.tokenizer.encode(answer))
        is_short = min(prompt_tokens, answer_tokens) < LEAST_TOKENS
        is_long = (
            prompt_tokens > MOST_PROMPT or prompt_tokens + answer_tokens > MOST_TOTAL
        )
        if not is_short and not is_long:
            yield LoadRequest(prompt, prompt_tokens, answer_tokens)


def _azure(options: WorkloadOptions, maker: PromptMaker) -> Iterator[LoadRequest]:
    rows = [*csv.DictReader(_text(options).splitlines())]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:TIMESTAMP_CHARS]) for row in rows]
    for row, time in zip(rows, times, strict=True):
        length = int(row["ContextTokens"])
        tokens = maker.walk(maker.draw_start(), length)
        prompt, prompt_tokens = maker.fit(tokens, length)
        at_s = (time - times[0]).total_seconds()
        yield LoadRequest(prompt, prompt_tokens, int(row["GeneratedTokens"]), at_s)


def _mooncake(options: WorkloadOptions, maker: PromptMaker) -> Iterator[LoadRequest]:
    rows = [json.loads(line) for line in _text(options).splitlines()]
    for row in rows:
        ids: list[int] = []
        for number in row["hash_ids"]:
            rng = np.random.default_rng([options.seed, number])
            positions = rng.integers(0, len(maker.allowed), MOONCAKE_TOKENS)
            ids += maker.allowed[positions].tolist()
        length = row["input_length"]
        prompt, prompt_tokens = maker.fit(ids[:length], length)
        at_s = 1e-3 * (row["timestamp"] - rows[0]["timestamp"])
        yield LoadRequest(prompt, prompt_tokens, row["output_length"], at_s)


def _text(options: WorkloadOptions) -> str:
    assert options.path is not None
    return options.path.read_text("utf-8")


DATASETS: dict[str, Callable[[WorkloadOptions, PromptMaker], Iterator[LoadRequest]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "azure": _azure,
    "mooncake": _mooncake,
}
