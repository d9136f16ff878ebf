"""What people read: small tables. Programs get JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from disagg.cli.client import Answer

MAX_WIDTH = 160  # columns; a table is as wide as its cells, and a spec is never cut

COLUMNS = ["", ">bytes", ">% of fp16", ">% of fp8"]
TIMES = (
    "hand-off: encode {encode_ms:.1f} ms, wire {wire_ms:.1f} ms, of that exposed "
    "{exposed_ms:.1f} ms, admit {admit_ms:.1f} ms"
)


def print_json(value: Any) -> None:
    """One JSON value on one line."""
    print(json.dumps(value))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table; columns that begin with ">" are aligned to the right."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=SIMPLE, title_justify="left", pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=MAX_WIDTH).print(table)


def answer_object(answer: Answer) -> dict[str, Any]:
    """What `submit --json` prints."""
    return asdict(answer)


def print_savings(answer: Answer) -> None:
    """What the hand-off saved, after the text of an answer."""
    kv = answer.kv
    if kv:
        print_table(f"KV of {kv['tokens']} tokens, {kv['codec']}", COLUMNS, _byte_rows(kv))
        print(TIMES.format(**kv))
    print(
        f"{answer.prompt_tokens} prompt tokens, {answer.completion_tokens} generated: the first "
        f"after {answer.ttft_ms:.0f} ms, then {answer.tpot_ms:.1f} ms each"
    )


def _byte_rows(kv: Mapping[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    fp16, fp8 = kv["fp16_bytes"], kv["fp8_bytes"]
    rows = [("as fp16", fp16), ("as fp8", fp8)]
    rows += [("on the wire", kv["wire_bytes"]), ("resident in decode", kv["resident_bytes"])]
    for name, nbytes in rows:
        yield name, f"{nbytes:,}", f"{100 * nbytes / fp16:.1f}", f"{100 * nbytes / fp8:.1f}"
