"""What people read: small tables, and what goes on meanwhile. Programs get JSON."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from disagg.cli.client import Answer

COLUMNS = ["", ">bytes", ">% of fp16", ">% of fp8"]
TIMES = {
    "encode_ms": "encode",
    "wire_ms": "wire",
    "exposed_ms": "of that exposed",
    "admit_ms": "admit",
}
SHORT_TOKENS = 256  # longer prompts have pages that are sealed


def tell(line: str) -> None:
    """A line on standard error, where it may be that nobody reads it any more, or its disk is full:
    what goes on matters more."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON value on one line."""
    print(json.dumps(value), flush=True)  # who reads a pipe waits for it


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """A title and a table; columns that begin with ">" are aligned to the right."""
    from disagg.bench.tables import format_table

    print(f"{title}\n\n{format_table(columns, [*rows])}\n")


def print_savings(answer: Answer, max_tokens: int) -> None:
    """What the hand-off saved, after the text of an answer."""
    if kv := answer.kv:
        _print_bytes(kv)
        times = [f"{told} {kv[x]:.1f} ms" for x, told in TIMES.items() if x in kv]
        if kv["wire_bytes"]:
            print(f"hand-off: {', '.join(times)}")
    count = answer.completion_tokens
    rest = f", then {answer.tpot_ms:.1f} ms each" if count > 1 else ""
    print(
        f"{answer.prompt_tokens} prompt tokens, {count} generated: the first "
        f"after {answer.ttft_ms:.0f} ms{rest}"
    )
    if answer.finish_reason == "length" and count < max_tokens:
        print(
            f"the model's context is full: {count} of {max_tokens} tokens could be generated"
        )


def _print_bytes(kv: Mapping[str, Any]) -> None:
    """A table, or one line for a prompt that is not sent, or as it is because it is so short."""
    fp16, fp8, wire = kv["fp16_bytes"], kv["fp8_bytes"], kv["wire_bytes"]
    if kv["tokens"] < SHORT_TOKENS and (
        not wire or min(wire, kv["resident_bytes"]) >= fp16
    ):
        saved = f"too few to save anything; {wire:,} bytes sent, {fp16:,} as fp16"
        whole = "too few to hand off, computed whole at a decode worker"
        print(f"KV of {kv['tokens']} tokens: {saved if wire else whole}")
        return
    rows = [("as fp16", fp16), ("as fp8", fp8)] + (
        [("on the wire", wire)] if wire else []
    )
    rows += (
        [("known there before", kv["cached_bytes"])] if kv.get("cached_bytes") else []
    )
    rows += [("resident in decode", kv["resident_bytes"])]
    cells = [
        (x, f"{y:,}", f"{100 * y / fp16:.1f}", f"{100 * y / fp8:.1f}") for x, y in rows
    ]
    print_table(f"KV of {kv['tokens']} tokens, {kv['codec']}", COLUMNS, cells)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Tell on standard error what goes on, for as long as this block takes.

    A terminal has one line with the seconds so far; anything else gets a line for each stage.
    """
    if not sys.stderr.isatty():
        began = time.monotonic()
        yield lambda stage: tell(f"{time.monotonic() - began:5.1f} s  {stage} ...")
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    told = TextColumn(
        "{task.description}", markup=False, table_column=Column()
    )  # may wrap
    screen = Console(stderr=True)
    with Progress(
        SpinnerColumn(), told, TimeElapsedColumn(), console=screen, transient=True
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage: bar.update(task, description=stage)
