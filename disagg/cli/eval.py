"""`disagg eval`: the quality of codecs, compared on the same text in one run."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from disagg.cli import options
from disagg.cli.output import print_json, print_table, stages
from disagg.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from disagg.eval.quality import Judge

Row = dict[str, Any]  # a JSON object
OUTLIERS = "outliers"
FACTORS = (1, 8, 64, 256)
SHAPE_OPTIONS = ("rows", "prompt", "score", "free", "streaming")


def evaluate(
    model: options.Model = None,
    codec: list[str] | None = Option(
        None, "--codec", help="Spec or plan; may be repeated."
    ),
    text: list[str] | None = Option(
        None, "--text", help='Text file, or "python"; may be repeated.'
    ),
    rows: int = Option(4, min=1, help="Samples per text."),
    prompt: int = Option(1152, min=1, help="Tokens to compress."),
    score: int = Option(384, min=2, help="Tokens to score after them."),
    free: int = Option(0, min=0, help="Greedy tokens to compare with exact KV."),
    passkey: list[int] | None = Option(
        None,
        "--passkey",
        help="Prompt length for pass-key retrieval; may be repeated.",
    ),
    keys: int | None = Option(
        None, min=1, help="Pass keys per length and depth; default: 5."
    ),
    stress: str | None = Option(
        None,
        help=f'"{OUTLIERS}": measure again with channels of K scaled by 8, 64 and 256.',
    ),
    streaming: bool = Option(
        False, "--streaming", help="Compress the scored tokens too, as a service does."
    ),
    threads: int = Option(1, min=1, max=1024, help="Torch threads."),
    out: Path | None = Option(
        None, callback=options.writable, help="Write results to this JSON file."
    ),
    plot: options.Plot = None,
    resume: bool = Option(False, "--resume", help="Continue the run in --out."),
    save_costs: bool = Option(
        False, "--save-costs", help="Store perplexity and KL for `disagg codecs`."
    ),
    as_json: options.Json = False,
) -> None:
    """Measure how codecs change a model's answers."""
    from disagg.eval.texts import PYTHON

    texts = tuple(text or (PYTHON,))
    options.refuse_idle(not passkey, "without --passkey", keys=keys)
    _check_stress(stress, passkey=passkey, plot=plot, save_costs=save_costs or None)
    _check(model, texts, out, resume)
    with stages() as report:
        report("loading torch and the model")
        from disagg.eval.quality import EvalOptions, Judge

        judge = Judge(
            EvalOptions(
                model=model,
                codecs=tuple(codec or ()),
                texts=texts,
                rows=rows,
                prompt=prompt,
                score=score,
                free=free,
                passkeys=tuple(passkey or ()),
                keys=keys or EvalOptions.keys,
                factors=FACTORS if stress else EvalOptions.factors,
                streaming=streaming,
                threads=threads,
            )
        )
    result = _measure(judge, out, plot, resume)
    if save_costs:
        _save_costs(result)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _check_stress(stress: str | None, **others: object) -> None:
    """ConfigError for an unknown stress test, and for options that do not work with one."""
    if stress is None:
        return
    if stress != OUTLIERS:
        raise UnknownNameError.of("stress test", stress, [OUTLIERS])
    options.refuse_idle(True, "with --stress", **others)


def _check(
    model: str | None, texts: Sequence[str], out: Path | None, resume: bool
) -> None:
    """Check what does not need torch, whose import takes seconds."""
    from disagg.eval.texts import read_text
    from disagg.model.describe import locate_model

    locate_model(model)
    if len({read_text(text)[0] for text in texts}) < len(texts):
        raise ConfigError(f"two of {', '.join(texts)} have the same name; rename one")
    if resume:
        _earlier(out)


def _measure(judge: "Judge", out: Path | None, plot: Path | None, resume: bool) -> Row:
    """Measure the remaining cases, and write each row to the file at once."""
    from disagg.bench.result import progress, write
    from disagg.eval.quality import Case
    from disagg.eval.recall import RecallCase

    rows, keys = _earlier_rows(judge, out) if resume and out else ([], [])
    cases: list[Case | RecallCase] = [*judge.cases(rows), *judge.recall.cases(keys)]
    for case in progress(cases, str):
        if isinstance(case, Case):
            rows.append(judge.measure(case))
        else:
            keys.append(judge.recall.measure(case))
        if out is not None:
            write(_result(judge, rows, keys), out)
    result = _result(judge, rows, keys)
    if out is not None:  # once more: all rows may have been known
        write(result, out)
    if plot is not None:
        from disagg.report.quality import draw

        draw(result["summary"], _title(result), plot)
    return result


def _result(judge: "Judge", rows: list[Row], keys: list[Row]) -> Row:
    from disagg.bench.result import result_of
    from disagg.eval.recall import summarize_recall
    from disagg.eval.summary import (
        exact_perplexity,
        perplexity_by_factor,
        summarize,
    )

    return result_of(
        rows,
        "paired with exact KV; pages as served; errors are of attention of the prompt's last "
        "queries; answer_pct: behind 1,024 more tokens",
        model={
            "name": judge.options.model or "default",
            "fingerprint": judge.runner.fingerprint,
            **judge.layers(),
        },
        options=_options(judge),
        perplexity=exact_perplexity(rows),
        **(
            {"perplexity_by_factor": perplexity_by_factor(rows)}
            if len(judge.options.factors) > 1
            else {}
        ),
        summary=summarize(rows, judge.sizes),
        recall=summarize_recall(keys),
        keys=keys,
    )


def _options(judge: "Judge") -> Row:
    """The options that rows depend on, except the model and codecs."""
    values = asdict(judge.options)
    return {name: values[name] for name in SHAPE_OPTIONS}


def _earlier_rows(judge: "Judge", out: Path) -> tuple[list[Row], list[Row]]:
    """Rows and pass keys of an earlier run of the same kind."""
    fingerprint, options_of_file, rows, keys = _earlier(out)
    options_of_run = _options(judge)
    same_model = fingerprint == judge.runner.fingerprint
    if not same_model or options_of_run != options_of_file:
        raise ConfigError(
            f"{out} is of another model or options, {options_of_file}; this run: {options_of_run}"
        )
    return rows, keys


def _earlier(out: Path | None) -> tuple[str, Row, list[Row], list[Row]]:
    """Fingerprint, options, rows and pass keys of a file; ConfigError for one without."""
    rule = "--resume continues an earlier result of `disagg eval`, the file of --out"
    if out is None or not out.is_file():
        raise ConfigError(f"{rule}, which does not exist")
    try:
        result = json.loads(out.read_text())
        return (
            result["model"]["fingerprint"],
            result["options"],
            result["rows"],
            result["keys"],
        )
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{rule}; {out} is not one: {error!r}") from error


def _save_costs(result: Row) -> None:
    """Into the package, for `disagg codecs`."""
    from disagg.bench.result import write
    from disagg.codecs.describe import COSTS
    from disagg.eval.summary import costs

    measured = {
        "model": result["model"]["name"],
        "command": result["command"],
        "options": result["options"],
        "perplexity": result["perplexity"],
        "codecs": costs(result["summary"]),
    }
    write(measured, COSTS)


def _title(result: Row) -> str:
    shape = result["options"]
    kind = "sealed while fed" if shape["streaming"] else "exact behind the prompt"
    return (
        f"{result['model']['name']}: {shape['prompt']:,} tokens compressed, {shape['score']:,} fed "
        f"({kind}), {shape['rows']} rows of {', '.join(result['perplexity'])}"
    )


def _show(result: Row) -> None:
    from disagg.eval.summary import table_rows

    by_factor = result.get("perplexity_by_factor")
    if by_factor:
        _show_stress(result, by_factor)
        return
    _print(_title(result), table_rows(result["summary"]))
    recall = result["recall"]
    if recall:
        cells = [[str(value) for value in row.values()] for row in recall]
        columns = ["codec", *(f">{case}" for case in recall[0] if case != "codec")]
        print_table("% of pass keys found, by tokens @ depth", columns, cells)
    print(f"exact perplexity: {_texts(result['perplexity'])}")
    _show_layers(result["model"])


def _show_layers(model: Row) -> None:
    """Say which layers codecs apply to, where these are not all."""
    if model["state_layers"]:
        print(
            f"layers with K and V, which codecs apply to: {model['kv_layers']}; "
            f"layers with states, exact under every codec: {model['state_layers']}, "
            f"{model['state_bytes']:,} bytes a sequence"
        )


def _show_stress(result: Row, by_factor: dict[str, dict[str, float]]) -> None:
    from disagg.eval.summary import stress_rows

    title = "KL in nats per token (error of attention in the worst layer), by factor of outliers"
    _print(f"{_title(result)}; {title}", stress_rows(result["summary"]))
    for factor, perplexity in by_factor.items():
        print(f"exact perplexity, x {factor}: {_texts(perplexity)}")
    _show_layers(result["model"])


def _texts(perplexity: dict[str, float]) -> str:
    """The perplexity of each text."""
    return ", ".join(f"{name} {value}" for name, value in perplexity.items())


def _print(title: str, rows: list[list[tuple[str, str]]]) -> None:
    """A table from the headers and cells of its rows."""
    columns = [column for column, _ in rows[0]]
    print_table(title, columns, [[cell for _, cell in row] for row in rows])
