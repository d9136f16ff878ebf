"""What people read: small tables. Programs get JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from disagg.cli.client import Answer


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
    Console(highlight=False, soft_wrap=True).print(table)


def answer_object(answer: Answer) -> dict[str, Any]:
    """What `submit --json` prints."""
    return asdict(answer)


def print_savings(answer: Answer) -> None:
    """What the hand-off saved, after the text of an answer."""
    kv = answer.kv
    tokens = f"{answer.prompt_tokens} prompt tokens, {answer.completion_tokens} generated"
    rows = [(tokens, "", f"first after {answer.ttft_ms:.0f} ms, then {answer.tpot_ms:.1f} ms each")]
    if kv:
        rows += list(_byte_rows(kv))
        times = "encode {encode_ms:.1f} ms, wire {wire_ms:.1f} ms, exposed {exposed_ms:.1f} ms, "
        times += "admit {admit_ms:.1f} ms"
        rows.append(("hand-off", "", times.format(**kv)))
    title = f"KV by {kv['codec']}" if kv else "no hand-off was needed"
    print_table(title, ["", ">bytes", ""], rows)


def _byte_rows(kv: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    exact = kv["fp16_bytes"]
    yield "fp16 would be", f"{exact:,}", ""
    yield "fp8 would be", f"{kv['fp8_bytes']:,}", ""
    for name, key in (("on the wire", "wire_bytes"), ("in decode memory", "resident_bytes")):
        share = f"{100 * kv[key] / exact:.1f} % of fp16, {100 * kv[key] / kv['fp8_bytes']:.1f} %"
        yield name, f"{kv[key]:,}", f"{share} of fp8"
