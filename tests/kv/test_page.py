import pytest

from disagg.errors import LayoutError
from disagg.kv.page import Kind, Plane, make_layout, make_raw_layout


def layout(spec: str = "x", tokens: int = 64):
    planes = [
        ("a", "int16", (3, 5)),
        ("b", "float16", (7,)),
        ("c", "uint8", (1,)),
    ]
    return make_layout(spec, Kind.PAGE, tokens, planes)


def test_planes_start_on_16_byte_boundaries_and_never_overlap():
    spans = [(plane.offset, plane.nbytes) for plane in layout().planes]

    assert spans == [(0, 30), (32, 14), (48, 1)]
    assert layout().block_bytes == 64


def test_fingerprint_stands_for_spec_kind_tokens_and_planes():
    assert layout().fingerprint == layout().fingerprint

    layouts = [
        layout(),
        layout("y"),
        layout(tokens=32),
        make_layout("x", Kind.RAW, 64, [("a", "int16", (3, 5))]),
        make_layout("x", Kind.PAGE, 64, [("a", "int16", (5, 3))]),
    ]
    fingerprints = {layout.fingerprint for layout in layouts}

    assert len(fingerprints) == 5


def test_a_missing_plane_is_an_error_that_lists_the_planes():
    with pytest.raises(LayoutError, match="no plane 'k_codes'; it has a, b, c"):
        layout().plane("k_codes")


def test_a_raw_page_holds_sixteen_tokens_of_k_then_v():
    raw = make_raw_layout("bfloat16", 80)

    k, v = raw.planes
    assert k == Plane("k", "bfloat16", (16, 80), 0)
    assert v == Plane("v", "bfloat16", (16, 80), 2560)
    assert raw.block_bytes == 5120
