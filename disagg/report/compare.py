"""Seconds of a request by link and codec, beside co-located workers: one run of `bench compare`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.report.transfer import COLORS, draw_log_scale, new_figure

PANELS = {
    "first_decode_s": "seconds to the first decode token",
    "request_s": "seconds of a request",
}


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw a result of `disagg.bench.compare` to a file whose name says the format."""
    figure = new_figure(12, 5.5)
    together, *apart = result["rows"]
    known = "known to prefill" if result["cached"] else "computed"
    figure.suptitle(
        f"{result['model']}, prompts of {result['tokens']} tokens, {known}; prefill makes "
        f"{1e-6 * result['kv_bytes_per_s']:.3g} MB of KV a second in fp16",
        fontsize=11,
    )
    codecs = dict.fromkeys(row["codec"] for row in apart)
    rates = sorted({row["link_times"] for row in apart})
    for panel, (key, label) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        panel.axhline(together[key], color="black", linestyle="--", label="co-located")
        for color, codec in zip(COLORS, codecs, strict=False):
            line = sorted((x["link_times"], x[key]) for x in apart if x["codec"] == codec)
            panel.plot(*zip(*line, strict=True), "o-", color=color, markersize=4, label=codec)
        panel.set_xscale("log", base=2)
        draw_log_scale(panel)
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.set_xlabel("link, times the KV that prefill makes a second")
        panel.set_ylabel(label)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=150)
