"""`disagg eval`: what codecs cost in quality, all on the same rows of text in one run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from disagg.cli import options
from disagg.cli.output import print_json, print_table
from disagg.errors import ConfigError

if TYPE_CHECKING:
    from disagg.eval.quality import Judge

Codecs = Annotated[list[str] | None, typer.Option("--codec", help="Spec or plan; may be repeated.")]
Texts = Annotated[
    list[str] | None, typer.Option("--text", help='A file, or "python"; may be repeated.')
]
Rows = Annotated[int, typer.Option(min=1, help="Of each text.")]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens that are compressed.")]
Score = Annotated[int, typer.Option(min=2, help="Tokens fed behind them.")]
Streaming = Annotated[bool, typer.Option("--streaming", help="Seal tails meanwhile, as service.")]
Threads = Annotated[int, typer.Option(min=1, help="Of torch.")]
Out = Annotated[Path | None, typer.Option(help="Write the result to this file, row by row.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw to this .png, .svg or .pdf file.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep the rows that --out has.")]


def evaluate(
    model: options.Model = None,
    codec: Codecs = None,
    text: Texts = None,
    rows: Rows = 4,
    prompt: Prompt = 1152,
    score: Score = 384,
    streaming: Streaming = False,
    threads: Threads = 1,
    out: Out = None,
    plot: Plot = None,
    resume: Resume = False,
    as_json: options.Json = False,
) -> None:
    """Perplexity, KL, top-1 and bytes of codecs, paired with exact KV."""
    from disagg.eval.quality import CODECS, EvalOptions, Judge
    from disagg.eval.texts import PYTHON

    codecs, texts = tuple(codec or CODECS), tuple(text or (PYTHON,))
    asked = EvalOptions(model, codecs, texts, rows, prompt, score, streaming, threads)
    result = _measure(Judge(asked), out, plot, resume)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _measure(judge: "Judge", out: Path | None, plot: Path | None, resume: bool) -> dict[str, Any]:
    """Every case that is left; the file has each row as soon as it is known."""
    from disagg.bench.result import tell, write

    if plot is not None:
        from disagg.report.quality import draw
        from disagg.report.transfer import check_name

        check_name(plot)
    rows = _known(judge, out) if resume else []
    for case in tell(judge.cases(rows), str):
        rows.append(judge.measure(case))
        if out is not None:
            write(_result(judge, rows), out)
    result = _result(judge, rows)
    if plot is not None:
        draw(result["summary"], _title(result), plot)
    return result


def _result(judge: "Judge", rows: list[dict[str, Any]]) -> dict[str, Any]:
    from disagg.bench.result import result_of
    from disagg.eval.summary import exact_perplexity, summarize

    return result_of(
        rows,
        "paired with exact KV; pages as served; errors are of attention of the prompt's last "
        "queries; answer_pct: behind 1,024 more tokens",
        model={"name": judge.options.model or "default", "fingerprint": judge.runner.fingerprint},
        options=_options(judge),
        perplexity=exact_perplexity(rows),
        summary=summarize(rows, judge.sizes),
    )


def _options(judge: "Judge") -> dict[str, Any]:
    """What rows depend on, but for the model and their codecs."""
    given = asdict(judge.options)
    return {name: given[name] for name in ("rows", "prompt", "score", "streaming")}


def _known(judge: "Judge", out: Path | None) -> list[dict[str, Any]]:
    """The rows of an earlier run of the same kind."""
    if out is None or not out.is_file():
        raise ConfigError("--resume goes on with the file of --out, and there is none")
    earlier = json.loads(out.read_text())
    here = (judge.runner.fingerprint, _options(judge))
    there = (earlier["model"]["fingerprint"], earlier["options"])
    if here != there:
        raise ConfigError(f"{out} is of another model or of {there[1]}; this run: {here[1]}")
    return list(earlier["rows"])


def _title(result: dict[str, Any]) -> str:
    shape = result["options"]
    kind = "sealed while fed" if shape["streaming"] else "exact behind the prompt"
    return (
        f"{result['model']['name']}: {shape['prompt']:,} tokens compressed, {shape['score']:,} fed "
        f"({kind}), {shape['rows']} rows of {', '.join(result['perplexity'])}"
    )


def _show(result: dict[str, Any]) -> None:
    from disagg.eval.summary import columns, table_rows

    summary, exact = result["summary"], result["perplexity"]
    print_table(_title(result), columns(summary), table_rows(summary))
    print("exact perplexity: " + ", ".join(f"{name} {value}" for name, value in exact.items()))
