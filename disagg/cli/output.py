"""What commands print: tables and progress for people, JSON for programs."""

import json
import os
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
    """Print a line on standard error; ignore a closed pipe or a full disk."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON value on one line."""
    print(json.dumps(value), flush=True)  # the reader of a pipe waits for it


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """A title and a table; columns that begin with ">" are aligned to the right."""
    from disagg.bench.tables import format_table

    print(f"{title}\n\n{format_table(columns, [*rows])}\n")


def print_savings(answer: Answer, max_tokens: int) -> None:
    """What the hand-off saved, after the text of an answer."""
    kv = answer.kv
    if kv:
        _print_bytes(kv)
        times = [
            f"{label} {kv[key]:.1f} ms" for key, label in TIMES.items() if key in kv
        ]
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
    """A table of sizes; one line for a prompt that is too short to save anything."""
    fp16 = kv["fp16_bytes"]
    wire = kv["wire_bytes"]
    resident = kv["resident_bytes"]
    wire_states = kv.get("wire_state_bytes", 0)
    states = kv.get("state_bytes", 0)
    saves_nothing = not wire or min(wire - wire_states, resident - states) >= fp16
    if kv["tokens"] < SHORT_TOKENS and saves_nothing:
        outcome = "too few to hand off; computed on the decode worker"
        if wire:
            outcome = f"too few to save anything; {wire:,} bytes sent, {fp16:,} as fp16"
        print(f"KV of {kv['tokens']} tokens: {outcome}")
        return
    sizes = {
        "as fp16": fp16,
        "as fp8": kv["fp8_bytes"],
        "on the wire": wire,
        "states, in these": wire_states if wire else 0,
        "cached there before": kv.get("cached_bytes"),
        "resident in decode": resident,
        "states, resident": states,
    }
    rows = [
        (
            label,
            f"{nbytes:,}",
            f"{100 * nbytes / fp16:.1f}",
            f"{100 * nbytes / kv['fp8_bytes']:.1f}",
        )
        for label, nbytes in sizes.items()
        if nbytes
    ]
    print_table(f"KV of {kv['tokens']} tokens, {kv['codec']}", COLUMNS, rows)


@contextmanager
def stages(is_live: bool = True) -> Iterator[Callable[[str], None]]:
    """Report progress on standard error while this block runs.

    is_live: on a terminal, overwrite one line, with the seconds so far. In the background, and for
             a process that stays (`disagg serve`), print a line per stage instead: the overwritten
             line could be the output of another command
    """
    if not (is_live and _owns_terminal()):
        began = time.monotonic()
        yield lambda stage: tell(f"{time.monotonic() - began:5.1f} s  {stage} ...")
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    description = TextColumn("{task.description}", markup=False)
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TimeElapsedColumn(),
        description,
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda stage: progress.update(task, description=stage)


def _owns_terminal() -> bool:
    """Whether standard error is a terminal, and this process is in its foreground."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:
        return False
