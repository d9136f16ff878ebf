"""The input of a step, and its output: rows, written as they come."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from disagg.bench.result import Row


@dataclass(frozen=True)
class Setting:
    """Where and how a step runs.

    rehearsal: at tiny sizes; without a GPU, on the interpreter and on stand-ins
    scratch:   a folder of its own; until: on the monotonic clock, no row begins after
               it
    """

    rehearsal: bool
    scratch: Path
    until: float

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsal else "cuda")

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()


@dataclass(frozen=True)
class Step:
    """One of the steps.

    seconds:  its share of the budget
    rows:     yields JSON objects; one with a `failure` says what was wrong
    headline: a few lines for people
    """

    name: str
    seconds: float
    rows: Callable[[Setting], Iterator[Row]]
    headline: Callable[[list[Row]], list[str]]
