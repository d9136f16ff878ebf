"""Tables as text: as wide as the terminal, or as their cells if piped."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

ANY_WIDTH = 1 << 16  # columns, more than any table has
HEIGHT = 25  # any: rich ignores the width without it where TERM is "dumb"
GAP = 2  # blanks between two columns
MIN_WRAPPED = 12  # columns of text are wrapped to no less than this


def tables(result: Mapping[str, Any]) -> str:
    """All tables of a result: its rows, and its other lists of rows."""
    lists = [result["rows"]]
    for name, value in result.items():
        if name != "rows" and isinstance(value, list):
            lists.append(value)
    return "\n\n".join(table(rows) for rows in lists if rows)


def table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str] = ()) -> str:
    """A column for every key that some row has: text on the left, numbers on the right.

    If the terminal is too narrow, values that all rows share are in a line above the table.
    """
    keys = keys or list(dict.fromkeys(key for row in rows for key in row))
    text = _table_of(rows, keys)
    shared = _shared_keys(rows, keys)
    longest_line = max(map(len, text.splitlines()))
    if longest_line <= _available_width() or not shared:
        return text
    facts = [f"{key.replace('_', ' ')} {format_cell(rows[0][key])}" for key in shared]
    others = [key for key in keys if key not in shared]
    return f"{', '.join(facts)}\n\n{_table_of(rows, others)}"


def _shared_keys(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """The keys with one value in all rows; none if there is a single row."""
    if len(rows) == 1:
        return []
    return [key for key in keys if len({str(row.get(key)) for row in rows}) == 1]


def _table_of(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    columns = []
    for key in keys:
        is_text = any(isinstance(row.get(key), str) for row in rows)
        columns.append(f"{'' if is_text else '>'}{key.replace('_', ' ')}")
    cells = [[format_cell(row.get(key, "")) for key in keys] for row in rows]
    return format_table(columns, cells)


def format_cell(value: Any) -> str:
    """Floats with three digits, or as whole numbers from 100 on; nothing for None."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text; columns that begin with ">" are aligned to the right.

    On a terminal it fits the width: headers break between words, then long columns of text wrap.
    Elsewhere it is as wide as its cells, without a rule below the header.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    is_terminal = sys.stdout.isatty()
    width = _available_width()
    headers = [column.removeprefix(">") for column in columns]
    if full_width(headers, rows) > width:
        headers = [header.replace(" ", "\n") for header in headers]
    grid = Table(
        box=SIMPLE_HEAD if is_terminal else None,
        show_edge=False,
        padding=(0, GAP - 1, 0, 0) if is_terminal else (0, GAP, 0, 0),
    )
    least_width = -GAP  # none after the last column
    for index, header in enumerate(headers):
        cells = [row[index] for row in rows]
        least_width += _add_column(grid, header, columns[index], cells) + GAP
    for row in rows:
        grid.add_row(*row)
    text = StringIO()
    console = Console(
        file=text,
        markup=False,
        highlight=False,
        width=max(width, least_width),
        height=HEIGHT,
    )
    console.print(grid)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join(lines)


def _available_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else ANY_WIDTH


def _add_column(grid: "Table", header: str, column: str, cells: Sequence[str]) -> int:
    """The width that the column needs at least."""
    cell_width = max((len(cell) for cell in cells), default=0)
    header_width = max(len(line) for line in header.split("\n"))
    is_number = column.startswith(">")
    is_wrapped = cell_width > MIN_WRAPPED and not is_number
    grid.add_column(
        header,
        justify="right" if is_number else "left",
        no_wrap=not is_wrapped,
        overflow="fold",
        min_width=MIN_WRAPPED if is_wrapped else None,
    )
    return max(MIN_WRAPPED if is_wrapped else cell_width, header_width)


def full_width(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The width of a table whose cells are not wrapped."""
    columns = zip(headers, *rows, strict=True)
    widths = [max(len(cell) for cell in column) for column in columns]
    return sum(widths) + GAP * (len(widths) - 1)
