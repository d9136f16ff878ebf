"""The papers' own reference functions, on one realistic input: what they made of it is in golden/.

golden/README.md says which function of which commit made each file.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from disagg.codecs import get_codec
from disagg.codecs.contract import Codec, Encoded, Prompt
from disagg.codecs.gear import Gear
from disagg.codecs.quantized import prompt_format
from disagg.kernels.formats import Scale, Side
from disagg.kernels.reference import quantize
from disagg.kernels.reference.lowrank import rotation, unrotate
from disagg.kernels.reference.pages import DenseBlocks
from disagg.paged.compressed_kv import compress
from tests.synthetic import relative_error

GOLDEN = Path(__file__).parents[1] / "golden"
PREFIX = 256  # tokens: whole pages of the 300 that the input has


@cache
def golden(name: str) -> dict[str, Tensor]:
    """The arrays of one file, without their batch dimension of 1."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def encode(codec: Codec, k: Tensor, v: Tensor) -> Encoded:
    """The pages of a prompt without queries."""
    prompt = Prompt(k.shape[1], k)
    return codec.encode(k, v, 0, 0, prompt, None)


def inputs() -> tuple[Tensor, Tensor]:
    arrays = golden("inputs")
    k = arrays["k"][0, :, :PREFIX]
    v = arrays["v"][0, :, :PREFIX]
    return k.clone(), v.clone()


def stored(codec: Codec, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Codes [H, n, D] and scales [P, H, ...] of K, and of V, as a codec stores them."""
    fmt = prompt_format(codec, k.shape[2])
    blocks = DenseBlocks(encode(codec, k, v).blocks)

    def codes(side: Side) -> Tensor:
        return blocks.codes(side, torch.float32).transpose(0, 1)

    def scales(side: Side) -> Tensor:
        return blocks.scales(side, torch.float32)[0]

    k_codes = codes(fmt.k).flatten(1, 2)
    v_codes = codes(fmt.v).transpose(2, 3).flatten(1, 2)
    return [(k_codes, scales(fmt.k)), (v_codes, scales(fmt.v))]


def rebuilt(codec: Codec, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of the input that the pages of a codec stand for, without a tail."""
    group = codec.layer_group((0,), 4, 128, "float16")
    return codec.decode(encode(codec, k, v), group)


def assert_nearly(codes: Tensor, expected: Tensor, differing: float) -> None:
    """No code is off by more than one, and no more than this part of them."""
    off = (codes - expected).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= differing


def unpack_reference(words: Tensor, bits: int, axis: int) -> Tensor:
    """KIVI's packing: low bits first, along an axis of int32 words."""
    shifts = torch.arange(0, 32, bits)
    mask = (1 << bits) - 1
    fields = (words.unsqueeze(-1) >> shifts) & mask
    return fields.movedim(-1, axis + 1).flatten(axis, axis + 1)


@pytest.mark.parametrize(
    ("bits", "differing"),
    [
        (2, 0.001),
        (4, 0.005),
    ],
)
def test_kivi_codes_are_its_authors_but_for_fp16_arithmetic(bits, differing):
    codec = get_codec(f"kivi:bits={bits},group=64,residual=0")
    theirs = golden(f"kivi_b{bits}_g64")
    their_k = unpack_reference(theirs["k_code"][0], bits, 1)
    their_v = unpack_reference(theirs["v_code"][0], bits, 2)

    (k_codes, _), (v_codes, _) = stored(codec, *inputs())
    assert_nearly(k_codes, their_k, differing)
    assert_nearly(v_codes, their_v[:, :PREFIX], differing)


@pytest.mark.parametrize("name", ["gear_pertoken_b4_g64", "flexgen_b4_g64"])
def test_pertoken_rebuilds_what_flexgen_rebuilds(name):
    k, v = inputs()
    codec = get_codec("pertoken:bits=4,group=64")
    new_k, new_v = compress(codec, k, v).reconstruct()
    theirs = golden(name)

    for exact, ours, key in ((k, new_k, "k_deq"), (v, new_v, "v_deq")):
        exact = exact.float()
        their_x = theirs[key][0, :, :PREFIX].float()
        their_error = relative_error(their_x, exact)
        our_error = relative_error(ours, exact)
        assert our_error == pytest.approx(their_error, rel=0.01)
        assert relative_error(ours, their_x) < 0.15 * their_error


def test_kcvt_matches_gear_on_k_and_beats_it_on_v():
    k, v = inputs()
    new_k, new_v = compress(get_codec("kcvt:bits=4"), k, v).reconstruct()
    theirs = golden("gear_kcvt_b4")
    their_k = theirs["k_deq"][0]
    their_v = theirs["v_deq"][0]

    their_error = relative_error(their_k, k)
    assert relative_error(new_k, k) == pytest.approx(their_error, rel=0.01)
    assert relative_error(new_k, their_k) < 0.25 * their_error
    assert relative_error(new_v, v) < relative_error(their_v, v)


def test_gear_l_errs_as_much_as_the_function_of_its_authors():
    k, v = inputs()
    codec = get_codec("gear-l:bits=2,backbone=kivi,group=64,rank=4")
    new_k, new_v = rebuilt(codec, k, v)
    theirs = golden("gear_gearl_kivi_b2_g64_r4")

    for exact, ours, key in ((k, new_k, "k_deq"), (v, new_v, "v_deq")):
        their_error = relative_error(theirs[key][0], exact)
        our_error = relative_error(ours, exact)
        assert our_error == pytest.approx(their_error, rel=0.01)


@pytest.mark.parametrize(
    ("sparsity", "k_ratio", "v_ratio"),
    [
        (1 / 64, 1.3, 0.88),
        (3 / 64, 1.04, 0.73),
    ],
)
def test_gear_errs_as_much_as_its_authors_with_as_many_outliers(
    sparsity, k_ratio, v_ratio
):
    """The codec itself. It has one slot of 64 for a channel of K, or three; theirs are 2 % of
    all heads together, and their V has no scales of each head."""
    k, v = inputs()
    codec = Gear(bits=4, backbone="kcvt", rank=4, sparsity=sparsity)
    new_k, new_v = rebuilt(codec, k, v)
    theirs = golden("gear_gear_kcvt_b4_s2_r4")
    backbone = golden("gear_kcvt_b4")

    for exact, ours, key, ratio in (
        (k, new_k, "k_deq", k_ratio),
        (v, new_v, "v_deq", v_ratio),
    ):
        our_error = relative_error(ours, exact)
        their_error = relative_error(theirs[key][0], exact)
        backbone_error = relative_error(backbone[key][0], exact)
        assert our_error == pytest.approx(ratio * their_error, rel=0.02)
        assert our_error < 0.8 * backbone_error


def test_decoquant_rebuilds_what_its_decomposition_rebuilds():
    """With one rotation and one scale for all heads together, as in the reference."""
    k, _ = inputs()
    x = k.float().transpose(0, 1).flatten(1)[None]  # [1, 256, 512]
    matrix = rotation(x, 16)
    rotated = unrotate(x, matrix)
    scale = Scale("row", 512, 0, center=-8)
    side = Side(256, 512, 4, 0, scale)
    codes, scales, zeros = quantize.quantize_side(rotated[None], side)
    scales = quantize.expand(scales, side)
    zeros = quantize.expand(zeros, side)
    decoded = (codes + zeros) * scales
    blocks = decoded[0, 0].unflatten(1, (-1, 16))
    ours = (blocks @ matrix[0].float()).flatten(1)

    theirs = golden("deco_n2_k_b4_j16")["recon"]
    their_error = relative_error(theirs, x[0])
    our_error = relative_error(ours, x[0])
    assert our_error == pytest.approx(their_error, rel=0.01)
    assert relative_error(ours, theirs) < 0.15 * their_error


@pytest.mark.parametrize(("index", "key"), [(0, "k"), (1, "v")])
def test_int8_codes_and_scales_are_the_expected_ones(index, key):
    theirs = golden("int8_fp8")
    codes, scales = stored(get_codec("int8"), *inputs())[index]

    their_codes = theirs[f"{key}_i8"][0, :, :PREFIX]
    assert_nearly(codes - 128, their_codes, 0.001)
    by_token = scales.transpose(0, 1).flatten(1)
    their_scales = theirs[f"{key}_s"][0, :, :PREFIX, 0]
    assert torch.equal(by_token, their_scales.float())


@pytest.mark.parametrize(("index", "key"), [(0, "k"), (1, "v")])
def test_fp8_codes_are_the_expected_ones_at_the_same_scale(index, key):
    """Theirs have one scale for all tokens; where a page's is the same, so are its codes."""
    theirs = golden("int8_fp8")
    kv = inputs()
    for x, name in zip(kv, "kv", strict=True):
        # every page and head gets the largest number
        largest = theirs[f"{name}_fs"][0].float() * 448
        largest = largest.reshape(-1, 1).expand(4, -1)
        x[:, ::64, 0] = largest.half()

    codes, _ = stored(get_codec("fp8"), *kv)[index]
    words = codes.to(torch.float8_e4m3fn).view(torch.uint8)
    is_equal = words == theirs[f"{key}_f8"][0, :, :PREFIX]
    others = torch.ones_like(is_equal)
    others[:, ::64, 0] = False
    assert is_equal[others].float().mean() > 0.999
