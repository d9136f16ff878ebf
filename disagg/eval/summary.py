"""From rows to one line for each codec: what it costs, and how sure that is."""

import math
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]  # a JSON object

NORMAL_95 = 1.96  # standard errors on each side of a 95 % interval


def summarize(rows: Sequence[Row], sizes: Callable[[str], Row]) -> list[Row]:
    """One object for each codec, in the order of the rows.

    rows:  of `Judge.measure` · sizes: what `Judge.sizes` gives for a spec
    ppl_pct:    what perplexity rises by; of each text in `texts`, of all tokens beside it
    ppl_se_pct: its standard error, over tokens paired with exact KV; ppl_ci_pct: 95 % interval
    kl, top1_pct: nats a token; tokens whose best guess is that of exact KV
    same: greedy tokens before the first that differs, on the mean
    error, error_min, error_max: relative, of attention outputs: mean, least and most of the layers
    """
    by_spec: dict[str, list[Row]] = {}
    for row in rows:
        by_spec.setdefault(row["spec"], []).append(row)
    return [
        {"codec": those[0]["codec"], "spec": spec, **sizes(spec)} | _line(those)
        for spec, those in by_spec.items()
    ]


def _line(rows: Sequence[Row]) -> Row:
    tokens, delta, error = paired(rows)
    layers = [
        sum(x) / len(rows) for x in zip(*(row["errors"] for row in rows), strict=True)
    ]
    bounds = (delta - NORMAL_95 * error, delta + NORMAL_95 * error)
    names = dict.fromkeys(row["text"] for row in rows)
    by_text = {
        name: paired([row for row in rows if row["text"] == name])[1] for name in names
    }
    return {
        "tokens": tokens,
        "texts": {name: round(percent(value), 3) for name, value in by_text.items()},
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
    """(tokens, mean of what a codec adds to their nats, standard error of that mean)."""
    tokens = sum(row["tokens"] for row in rows)
    mean = sum(row["delta"] for row in rows) / tokens
    variance = sum(row["delta_squares"] for row in rows) / tokens - mean**2
    return tokens, mean, math.sqrt(max(0.0, variance) / tokens)


def percent(nats: float) -> float:
    """What so many nats a token add to perplexity."""
    return 100 * math.expm1(nats)


def costs(summary: Sequence[Row]) -> dict[str, Row]:
    """What `disagg codecs` tells of each, by canonical spec."""
    kept = ("bits", "ppl_pct", "ppl_se_pct", "kl")
    return {line["spec"]: {name: line[name] for name in kept} for line in summary}


def exact_perplexity(rows: Sequence[Row]) -> dict[str, float]:
    """Of exact KV, by text; every row is counted once, however many codecs it has."""
    once = {(row["text"], row["row"]): row for row in rows}.values()
    found = {}
    for name in dict.fromkeys(row["text"] for row in once):
        those = [row for row in once if row["text"] == name]
        mean = sum(row["nll"] for row in those) / sum(row["tokens"] for row in those)
        found[name] = round(math.exp(mean), 3)
    return found


def table_rows(summary: Sequence[Row]) -> list[list[tuple[str, str]]]:
    """What people read: heads of columns, and cells; ">": aligned to the right."""
    free = any(line["same"] for line in summary)
    return [
        [
            ("codec", line["codec"]),
            (">bits", f"{line['bits']:.2f}"),
            (">% of fp16", f"{line['handoff_pct']:.1f}"),
            (">after 1,024", f"{line['answer_pct']:.1f}"),
            *(
                (f">{x} %", f"{y:+.2f}")
                for x, y in line["texts"].items()
                if len(line["texts"]) > 1
            ),
            (
                ">perplexity % ± s.e.",
                f"{line['ppl_pct']:+.2f} ± {line['ppl_se_pct']:.2f}",
            ),
            (">KL", f"{line['kl']:.4f}"),
            (">top-1 %", f"{line['top1_pct']:.1f}"),
            *([(">same tokens", f"{line['same']:.1f}")] if free else []),
            (
                "error of attention (layers)",
                f"{line['error']:.3f} ({line['error_min']:.3f}..{line['error_max']:.3f})",
            ),
        ]
        for line in summary
    ]
