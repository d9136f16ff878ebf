"""Rows of tokens for `Judge`: of equal length, spread evenly over texts."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from disagg.errors import ConfigError
from disagg.model.tokenizer import Tokenizer

PYTHON = (
    "python"  # a text on every machine: the language's reference, as `help` shows it
)
CHARS_PER_TOKEN = 8  # more than in any text, except for rows of blanks


def read_text(name: str) -> tuple[str, str]:
    """(short name, text) of "python" or of a file; for a .jsonl file the strings of every line."""
    if name == PYTHON:
        return name, "\n\n".join(topics.values())
    file = Path(os.path.expanduser(name))
    if not file.is_file():
        raise ConfigError(
            f"no text {name!r}: no such file; {PYTHON!r} is known without one"
        )
    text = file.read_text(encoding="utf8", errors="replace")
    if file.suffix == ".jsonl":
        text = _text_of_jsonl(text, name)
    return file.stem, text


def _text_of_jsonl(text: str, name: str) -> str:
    """The strings of every object, one a line, with a blank line between objects."""
    passages = []
    for line in text.split("\n"):
        if line.strip():
            try:
                values = json.loads(line).values()
            except (ValueError, AttributeError) as error:
                raise ConfigError(
                    f"{name}: expected a JSON object in each line; {error}"
                ) from error
            strings = [value for value in values if isinstance(value, str)]
            passages.append("\n".join(strings))
    return "\n\n".join(passages)


def cut_rows(
    text: str, tokenizer: Tokenizer, tokens: int, count: int
) -> list[Sequence[int]]:
    """`count` rows of `tokens` tokens, evenly spread; ConfigError if the text is too short."""
    rows: list[Sequence[int]] = []
    for i in range(count):
        start = i * (len(text) // count)
        ids = tokenizer.encode(text[start : start + CHARS_PER_TOKEN * tokens])
        if len(ids) < tokens:
            raise ConfigError(
                f"the text has {len(ids)} tokens after character {start:,}; row {i + 1} of "
                f"{count} takes {tokens}: ask for fewer or shorter rows"
            )
        rows.append(ids[:tokens])
    return rows
