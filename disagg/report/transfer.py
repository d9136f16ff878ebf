"""Plots of times against the rate of the link, one line per codec.

For `bench transfer`: the time to the first decode token. Solid lines: encoded while sending;
dashed: encoded beforehand. A cross marks a point where encoding takes longer than the link, so that
a faster link no longer helps. For `bench compare`: seconds per request, and those of co-located
workers.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
except ImportError as error:
    raise ConfigError("pictures need matplotlib: pip install 'disagg[plot]'") from error

Row = Mapping[str, Any]  # a JSON object

COMPARED = {
    "first_decode_s": "seconds to the first decode token",
    "request_s": "seconds per request",
}
COLORS = (
    "#4d4d4d",
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c6d31",
)
KEY = (
    Line2D([], [], color="black", label="encoded while it is sent"),
    Line2D(
        [], [], color="black", linestyle="--", linewidth=1, label="encoded beforehand"
    ),
    Line2D(
        [],
        [],
        color="black",
        marker="X",
        linestyle="",
        label="encode is the bottleneck",
    ),
)


def draw(result: Row, file: Path) -> None:
    """Draw a result of either benchmark; the suffix of the file is the format."""
    picture = compare_figure if "kv_bytes_per_s" in result else transfer_figure
    picture(result).savefig(file, dpi=150)


def transfer_figure(result: Row) -> Figure:
    """The plot of `bench transfer`, with a panel for each prompt length."""
    rows = sorted(result["rows"], key=lambda row: row["gbps"])
    lengths = sorted({row["tokens"] for row in rows})
    codecs = list(dict.fromkeys(row["codec"] for row in rows))
    figure = new_figure(1 + 5.5 * len(lengths), 5.5)
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for panel, tokens in zip(panels, lengths, strict=True):
        panel_rows = [row for row in rows if row["tokens"] == tokens]
        _panel(panel, panel_rows, codecs)
        size = f"{1e-6 * panel_rows[0]['fp16_bytes']:,.0f} MB in fp16"
        panel.set_title(f"prompt of {tokens:,} tokens, {size}")
    panels[0].set_ylabel("seconds to the first decode token, without compute")
    lines = [
        Line2D([], [], color=color, label=codec)
        for codec, color in zip(codecs, cycle(COLORS), strict=False)
    ]
    figure.legend(
        handles=[*lines, *KEY], loc="outside lower center", ncols=2, frameon=False
    )
    return figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, its size in inches, drawn without a screen."""
    return Figure(figsize=(width, height), layout="constrained")


def _panel(panel: Axes, rows: Sequence[Row], codecs: Sequence[str]) -> None:
    for codec, color in zip(codecs, cycle(COLORS), strict=False):
        for pages, style in (("inline", "-"), ("ready", "--")):
            line = [
                row for row in rows if (row["codec"], row["pages"]) == (codec, pages)
            ]
            panel.plot(
                [row["gbps"] for row in line],
                [row["seconds"] for row in line],
                style,
                color=color,
                linewidth=1.8 if pages == "inline" else 1.0,
            )
            for row in line:
                is_crossed = row["bottleneck"] == "encode"
                panel.plot(
                    row["gbps"],
                    row["seconds"],
                    "X" if is_crossed else "o",
                    color=color,
                    markersize=8.0 if is_crossed else 3.5,
                )
    panel.set_xscale("log")
    draw_log_scale(panel)
    panel.set_xticks(sorted({row["gbps"] for row in rows}))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("link, Gb/s")


def draw_log_scale(panel: Axes) -> None:
    """A logarithmic y axis with plain numbers, and a grid."""
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.grid(which="major", color="#dddddd", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def compare_figure(result: Row) -> Figure:
    """The plot of `bench compare`, with a panel for each measure of a request."""
    figure = new_figure(12, 5.5)
    colocated, *disaggregated = result["rows"]
    prompts = "cached by prefill" if result["cached"] else "computed"
    figure.suptitle(
        f"{result['model']}, prompts of {result['tokens']} tokens, {prompts}; prefill "
        f"produces {1e-6 * result['kv_bytes_per_s']:.3g} MB/s of fp16 KV",
        fontsize=11,
    )
    codecs = dict.fromkeys(row["codec"] for row in disaggregated)
    rates = sorted({row["link_times"] for row in disaggregated})
    for panel, (key, label) in zip(
        figure.subplots(1, 2), COMPARED.items(), strict=True
    ):
        panel.axhline(colocated[key], color="black", linestyle="--", label="co-located")
        for codec, color in zip(codecs, cycle(COLORS), strict=False):
            points = sorted(
                (row["link_times"], row[key])
                for row in disaggregated
                if row["codec"] == codec
            )
            panel.plot(
                [x for x, _ in points],
                [y for _, y in points],
                "o-",
                color=color,
                markersize=4,
                label=codec,
            )
        panel.set_xscale("log", base=2)
        draw_log_scale(panel)
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.set_xlabel("link rate / KV rate of prefill")
        panel.set_ylabel(label)
    figure.legend(
        *panel.get_legend_handles_labels(), loc="outside lower center", ncols=5
    )
    return figure
