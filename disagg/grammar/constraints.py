"""Builders of constraints, and their check: what a client may ask for, as one text.

Each builder returns the text of `SamplingParams.grammar`. RequestError, with the place, for what
cannot be one.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def json_schema(schema: Mapping[str, Any] | bool) -> str:
    """JSON that a schema allows; RequestError with the JSON pointer of what is not supported."""
    raise NotImplementedError


def json_object() -> str:
    """Any JSON object."""
    raise NotImplementedError


def regex(pattern: str) -> str:
    """A text that a regular expression matches as a whole."""
    raise NotImplementedError


def choice(options: Sequence[str]) -> str:
    """One of some texts."""
    raise NotImplementedError


def lark(grammar: str) -> str:
    """A text of a grammar, in Lark's notation, in llama.cpp's GBNF or in EBNF."""
    raise NotImplementedError


def behind_thought(
    constraint: str,
    begin: str,
    end: str,
    special_tokens: Mapping[str, int],
    is_open: bool,
) -> str:
    """A free thought, and then what a constraint allows.

    begin, end: the marks of a thought, such as "<think>" and "</think>"; special tokens in them are
                such tokens
    is_open:    the prompt ends in a thought, so that the answer begins in it. Else the answer may
                begin with one, or be without
    """
    raise NotImplementedError


def check(constraint: str) -> None:
    """RequestError for a constraint that no engine can follow, or that is too large.

    May take a tenth of a second, without Python's lock; call it from a thread.
    """
    raise NotImplementedError
