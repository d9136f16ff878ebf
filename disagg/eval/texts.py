"""Rows of tokens to judge by: spread evenly over texts, each cut at the same length."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from disagg.errors import ConfigError
from disagg.model.tokenizer import Tokenizer

PYTHON = "python"  # the text that every machine has: the language's reference, as `help` shows it
CHARS_PER_TOKEN = 8  # more than any text has, but for rows of blanks


def read_text(name: str) -> tuple[str, str]:
    """(short name, text) of "python" or of a file; of a .jsonl file the strings of every line."""
    if name == PYTHON:
        return name, "\n\n".join(topics.values())
    file = Path(os.path.expanduser(name))
    if not file.is_file():
        raise ConfigError(
            f"no text {name!r}: no such file; {PYTHON!r} is known without one"
        )
    text = file.read_text(encoding="utf8", errors="replace")
    if file.suffix == ".jsonl":
        try:
            rows = [
                json.loads(line).values() for line in text.split("\n") if line.strip()
            ]
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                f"{name}: a JSON object in each line is wanted; {error}"
            ) from error
        text = "\n\n".join(
            "\n".join(x for x in row if isinstance(x, str)) for row in rows
        )
    return file.stem, text


def cut_rows(
    text: str, tokenizer: Tokenizer, tokens: int, count: int
) -> list[Sequence[int]]:
    """`count` rows of so many tokens, from places evenly spread; ConfigError if it is too short."""
    found: list[Sequence[int]] = []
    for i in range(count):
        start = i * (len(text) // count)
        ids = tokenizer.encode(text[start : start + CHARS_PER_TOKEN * tokens])
        if len(ids) < tokens:
            raise ConfigError(
                f"the text has {len(ids)} tokens behind character {start:,}; row {i + 1} of "
                f"{count} takes {tokens}: ask for fewer or shorter rows"
            )
        found.append(ids[:tokens])
    return found
