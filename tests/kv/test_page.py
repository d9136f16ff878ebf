import pytest

from disagg.errors import LayoutError
from disagg.kv.page import Kind, Plane, make_layout, make_raw_layout


def layout(spec: str = "x", tokens: int = 64):
    planes = [("a", "int16", (3, 5)), ("b", "float16", (7,)), ("c", "uint8", (1,))]
    return make_layout(spec, Kind.PAGE, tokens, planes)


def test_planes_start_on_16_byte_boundaries_and_never_overlap():
    offsets = [(plane.offset, plane.nbytes) for plane in layout().planes]
    assert offsets == [(0, 30), (32, 14), (48, 1)]
    assert layout().block_bytes == 64


def test_fingerprint_stands_for_spec_kind_tokens_and_planes():
    assert layout().fingerprint == layout().fingerprint
    others = {
        layout("y").fingerprint,
        layout(tokens=32).fingerprint,
        make_layout("x", Kind.RAW, 64, [("a", "int16", (3, 5))]).fingerprint,
        make_layout("x", Kind.PAGE, 64, [("a", "int16", (5, 3))]).fingerprint,
    }
    assert len(others | {layout().fingerprint}) == 5


def test_a_missing_plane_is_an_error_that_lists_the_planes():
    with pytest.raises(LayoutError, match="no plane 'k_codes'; it has a, b, c"):
        layout().plane("k_codes")


def test_a_raw_page_holds_sixteen_tokens_of_k_then_v():
    raw = make_raw_layout("bfloat16", 80)
    places = (("k", 0), ("v", 2560))
    assert raw.planes == tuple(
        Plane(name, "bfloat16", (16, 80), at) for name, at in places
    )
    assert raw.block_bytes == 5120
