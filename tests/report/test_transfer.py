from itertools import product

import pytest

pytest.importorskip("matplotlib")
from disagg.report.transfer import COLORS, draw, transfer_figure

CODECS = ("raw:dtype=fp16", "fp8", "kivi:bits=2,group=64,residual=64")


def make_rows() -> list[dict]:
    rows = []
    for (index, codec), tokens, gbps, pages in product(
        enumerate(CODECS), (100, 333), (10.0, 0.1, 1.0), ("ready", "inline")
    ):
        is_slow = pages == "inline" and gbps > 1
        row = {
            "codec": codec,
            "tokens": tokens,
            "gbps": gbps,
            "pages": pages,
            "seconds": tokens / gbps / (1 + index),
            "fp16_bytes": 1000 * tokens,
            "bottleneck": "encode" if is_slow else "link",
        }
        rows.append(row)
    return rows


def test_every_codec_has_a_line_of_its_colour_in_every_panel():
    figure = transfer_figure({"rows": make_rows()})

    assert len(figure.axes) == 2

    for panel in figure.axes:
        lines = [line for line in panel.lines if len(line.get_xdata()) > 1]
        assert len(lines) == 2 * len(CODECS)
        assert len({line.get_color() for line in lines}) == len(CODECS)
        assert all(list(line.get_xdata()) == [0.1, 1.0, 10.0] for line in lines)
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]

    assert labels[: len(CODECS)] == list(CODECS)


def test_points_where_encode_is_the_bottleneck_are_marked():
    figure = transfer_figure({"rows": make_rows()})
    for panel in figure.axes:
        marked = [line for line in panel.lines if line.get_marker() == "X"]
        assert len(marked) == len(CODECS)
        assert {line.get_xdata()[0] for line in marked} == {10.0}


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")]
)
def test_the_name_of_the_file_says_its_format(name, start, tmp_path):
    draw({"rows": make_rows()}, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_more_codecs_than_colours_repeat_the_first_colours(tmp_path):
    figures = {"link_times": 1.0, "first_decode_s": 1.0, "request_s": 2.0}
    codecs = [f"codec-{number}" for number in range(len(COLORS) + 2)]
    result = {
        "model": "m",
        "tokens": 9,
        "cached": False,
        "kv_bytes_per_s": 1e6,
        "rows": [{"codec": codec, **figures} for codec in codecs],
    }

    draw(result, tmp_path / "a.svg")

    assert f"codec-{len(COLORS) + 1}" in (tmp_path / "a.svg").read_text()
