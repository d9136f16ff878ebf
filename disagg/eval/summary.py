"""Summaries of rows: the cost in quality of each codec, with its standard error."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]  # a JSON object

NORMAL_95 = 1.96  # standard errors on each side of a 95 % interval


def summarize(rows: Sequence[Row], sizes: Callable[[str], Row]) -> list[Row]:
    """One object for each codec and factor of outliers, in the order of the rows.

    rows:  of `Judge.measure`
    sizes: the figures of `Judge.sizes` for a spec

    factor:     of outlier channels in the keys; left out where it is 1
    ppl_pct:    rise of perplexity over all tokens; `texts` has it for each text
    ppl_se_pct: its standard error, over tokens paired with exact KV
    ppl_ci_pct: its 95 % interval
    kl:         nats a token
    top1_pct:   tokens whose best guess is that of exact KV
    same:       mean number of greedy tokens before the first that differs
    error, error_min, error_max: relative error of attention outputs over layers
    """
    by_case: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        case = (row["spec"], _factor_of(row))
        by_case.setdefault(case, []).append(row)
    lines = []
    for (spec, factor), case_rows in by_case.items():
        line = {"codec": case_rows[0]["codec"], "spec": spec}
        if factor != 1:
            line["factor"] = factor
        line |= sizes(spec)
        line |= _line(case_rows)
        lines.append(line)
    return lines


def _factor_of(row: Row) -> int:
    """The factor of the outlier channels in a row or line."""
    return int(row.get("factor", 1))


def _line(rows: Sequence[Row]) -> Row:
    tokens, delta, error = paired(rows)
    errors_by_layer = zip(*(row["errors"] for row in rows), strict=True)
    layers = [sum(errors) / len(rows) for errors in errors_by_layer]
    bounds = (delta - NORMAL_95 * error, delta + NORMAL_95 * error)
    texts = {}
    for name in dict.fromkeys(row["text"] for row in rows):
        _, text_delta, _ = paired([row for row in rows if row["text"] == name])
        texts[name] = round(percent(text_delta), 3)
    return {
        "tokens": tokens,
        "texts": texts,
        "ppl_pct": round(percent(delta), 3),
        "ppl_se_pct": round(100 * math.exp(delta) * error, 3),
        "ppl_ci_pct": [round(percent(bound), 3) for bound in bounds],
        "kl": round(sum(row["kl"] for row in rows) / tokens, 6),
        "top1_pct": round(100 * sum(row["top1"] for row in rows) / tokens, 2),
        "same": round(sum(row["same"] for row in rows) / len(rows), 1),
        "error": round(sum(layers) / len(layers), 4),
        "error_min": round(min(layers), 4),
        "error_max": round(max(layers), 4),
    }


def paired(rows: Sequence[Row]) -> tuple[int, float, float]:
    """(tokens, mean of the nats that a codec adds to each, standard error of that mean)."""
    tokens = sum(row["tokens"] for row in rows)
    mean = sum(row["delta"] for row in rows) / tokens
    variance = sum(row["delta_squares"] for row in rows) / tokens - mean**2
    return tokens, mean, math.sqrt(max(0.0, variance) / tokens)


def percent(nats: float) -> float:
    """The rise of perplexity by this many nats a token, in percent."""
    return 100 * math.expm1(nats)


def costs(summary: Sequence[Row]) -> dict[str, Row]:
    """The figures that `disagg codecs` shows, by canonical spec."""
    names = ("bits", "ppl_pct", "ppl_se_pct", "kl")
    return {line["spec"]: {name: line[name] for name in names} for line in summary}


def perplexity_by_factor(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """`exact_perplexity` for each factor of outliers. All are equal if no score changes."""
    by_factor: dict[str, list[Row]] = {}
    for row in rows:
        factor = str(_factor_of(row))
        by_factor.setdefault(factor, []).append(row)
    return {
        factor: exact_perplexity(factor_rows)
        for factor, factor_rows in by_factor.items()
    }


def exact_perplexity(rows: Sequence[Row]) -> dict[str, float]:
    """The perplexity of exact KV, by text; each row counts once, however many codecs it has."""
    nats: dict[str, float] = {}
    tokens: dict[str, int] = {}
    unique_rows = {(row["text"], row["row"]): row for row in rows}
    for (text, _), row in unique_rows.items():
        nats[text] = nats.get(text, 0.0) + row["nll"]
        tokens[text] = tokens.get(text, 0) + row["tokens"]
    return {text: round(math.exp(nats[text] / tokens[text]), 3) for text in nats}


def table_rows(summary: Sequence[Row]) -> list[list[tuple[str, str]]]:
    """A table: column headers (">": right-aligned) and the cells of each codec."""
    has_free = any(line["same"] for line in summary)
    return [_table_row(line, has_free) for line in summary]


def _table_row(line: Row, has_free: bool) -> list[tuple[str, str]]:
    """has_free: whether greedy tokens were compared for any codec"""
    perplexity = f"{line['ppl_pct']:+.2f} ± {line['ppl_se_pct']:.2f}"
    layers = f"{line['error_min']:.3f}..{line['error_max']:.3f}"
    cells = [
        ("codec", line["codec"]),
        (">bits", f"{line['bits']:.2f}"),
        (">% of fp16", f"{line['handoff_pct']:.1f}"),
        (">after 1,024", f"{line['answer_pct']:.1f}"),
    ]
    if len(line["texts"]) > 1:
        for text, percent_of_text in line["texts"].items():
            cells.append((f">{text} %", f"{percent_of_text:+.2f}"))
    cells.append((">perplexity % ± s.e.", perplexity))
    cells.append((">KL", f"{line['kl']:.4f}"))
    cells.append((">top-1 %", f"{line['top1_pct']:.1f}"))
    if has_free:
        cells.append((">same tokens", f"{line['same']:.1f}"))
    cells.append(("error of attention (layers)", f"{line['error']:.3f} ({layers})"))
    return cells


def stress_rows(summary: Sequence[Row]) -> list[list[tuple[str, str]]]:
    """The table of a run with outliers: column headers and cells for each codec.

    A cell has KL in nats per token, and the error of attention in the worst layer.
    """
    by_codec: dict[str, list[tuple[str, str]]] = {}
    for line in summary:
        codec = line["codec"]
        if codec not in by_codec:
            by_codec[codec] = [("codec", codec)]
        column = f">x {_factor_of(line)}"
        cell = f"{line['kl']:.4f} ({line['error_max']:.2f})"
        by_codec[codec].append((column, cell))
    return list(by_codec.values())
