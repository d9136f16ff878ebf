"""A plot of quality against bytes, with a point for each codec of `disagg eval`."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from disagg.report.transfer import COLORS, new_figure

Row = dict[str, Any]  # a line of the summary of `disagg.eval`

PANELS = {
    "kl": "KL from exact KV, nats a token",
    "ppl_pct": "perplexity above exact KV, %",
}
LEAST = {"kl": 1e-5, "ppl_pct": 1e-2}  # smaller values are drawn here


def draw(summary: Sequence[Row], title: str, file: Path) -> None:
    """Draw a summary; the suffix of the file is the format."""
    figure = new_figure(12, 5.5)
    figure.suptitle(title, fontsize=11)
    for panel, (key, label) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        _panel(panel, summary, key)
        panel.set_ylabel(label)
    figure.savefig(file, dpi=150)


def _panel(panel: Any, summary: Sequence[Row], key: str) -> None:
    for line, color in zip(summary, cycle(COLORS), strict=False):
        x = line["handoff_pct"]
        y = max(line[key], LEAST[key])
        if key == "ppl_pct":
            low, high = (max(bound, LEAST[key]) for bound in line["ppl_ci_pct"])
            panel.vlines(x, low, high, color=color, linewidth=1)
        panel.plot(x, y, "o", color=color, markersize=5)
        panel.annotate(
            line["codec"],
            (x, y),
            (5, 3),
            textcoords="offset points",
            fontsize=7,
            color=color,
        )
    panel.set_yscale("log")
    panel.set_xlim(0, 1.25 * max(line["handoff_pct"] for line in summary))
    panel.set_xlabel("bytes at hand-off, % of fp16")
    panel.grid(which="major", color="#dddddd", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
