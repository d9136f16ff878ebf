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
    """The pages of a prompt of which nobody saw the queries."""
    return codec.encode(k, v, 0, 0, Prompt(k.shape[1], k), None)


def inputs() -> tuple[Tensor, Tensor]:
    found = golden("inputs")
    return found["k"][0, :, :PREFIX].clone(), found["v"][0, :, :PREFIX].clone()


def stored(codec: Codec, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Codes [H, n, D] and scales [P, H, ...] of K, and of V, as a codec stores them."""
    fmt, blocks = (
        prompt_format(codec, k.shape[2]),
        DenseBlocks(encode(codec, k, v).blocks),
    )
    k_codes, v_codes = (
        blocks.codes(x, torch.float32).transpose(0, 1) for x in (fmt.k, fmt.v)
    )
    scales = (blocks.scales(side, torch.float32)[0] for side in (fmt.k, fmt.v))
    codes = k_codes.flatten(1, 2), v_codes.transpose(2, 3).flatten(1, 2)
    return list(zip(codes, scales, strict=True))


def assert_nearly(codes: Tensor, wanted: Tensor, differing: float) -> None:
    """No code is off by more than one, and no more than this part of them."""
    off = (codes - wanted).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= differing


def unpack_reference(words: Tensor, bits: int, axis: int) -> Tensor:
    """KIVI's packing: low bits first, along an axis of int32 words."""
    shifts = torch.arange(0, 32, bits)
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.movedim(-1, axis + 1).flatten(axis, axis + 1)


@pytest.mark.parametrize(("bits", "differing"), [(2, 0.001), (4, 0.005)])
def test_kivi_codes_are_those_of_its_authors_but_for_their_fp16_arithmetic(
    bits, differing
):
    codec = get_codec(f"kivi:bits={bits},group=64,residual=0")
    reference = golden(f"kivi_b{bits}_g64")
    wanted_k = unpack_reference(reference["k_code"][0], bits, 1)
    wanted_v = unpack_reference(reference["v_code"][0], bits, 2)[:, :PREFIX]
    for (codes, _), wanted in zip(
        stored(codec, *inputs()), (wanted_k, wanted_v), strict=True
    ):
        assert_nearly(codes, wanted, differing)


@pytest.mark.parametrize("name", ["gear_pertoken_b4_g64", "flexgen_b4_g64"])
def test_pertoken_rebuilds_what_flexgen_rebuilds(name):
    x = inputs()
    seen = compress(get_codec("pertoken:bits=4,group=64"), *x).reconstruct()
    for exact, ours, key in zip(x, seen, ("k_deq", "v_deq"), strict=True):
        theirs = golden(name)[key][0, :, :PREFIX].float()
        exact = exact.float()
        step = relative_error(theirs, exact)
        assert relative_error(ours, exact) == pytest.approx(step, rel=0.01)
        assert relative_error(ours, theirs) < 0.15 * step


def test_kcvt_rebuilds_k_as_gear_does_and_v_better_by_its_finer_groups():
    k, v = inputs()
    seen_k, seen_v = compress(get_codec("kcvt:bits=4"), k, v).reconstruct()
    theirs = golden("gear_kcvt_b4")
    error = relative_error(theirs["k_deq"][0], k)
    assert relative_error(seen_k, k) == pytest.approx(error, rel=0.01)
    assert relative_error(seen_k, theirs["k_deq"][0]) < 0.25 * error
    assert relative_error(seen_v, v) < relative_error(theirs["v_deq"][0], v)


def test_gear_l_errs_as_much_as_the_function_of_its_authors():
    k, v = inputs()
    codec = get_codec("gear-l:bits=2,backbone=kivi,group=64,rank=4")
    encoded = encode(codec, k, v)
    seen = codec.decode(encoded, codec.layer_group((0,), 4, 128, "float16"))
    theirs = golden("gear_gearl_kivi_b2_g64_r4")
    for ours, exact, key in zip(seen, (k, v), ("k_deq", "v_deq"), strict=True):
        error = relative_error(theirs[key][0], exact)
        assert relative_error(ours, exact) == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize(
    ("sparsity", "of_k", "of_v"), [(1 / 64, 1.3, 0.88), (3 / 64, 1.04, 0.73)]
)
def test_gear_errs_as_much_as_its_authors_where_it_keeps_as_many_outliers(
    sparsity, of_k, of_v
):
    """The codec itself. It has one slot of 64 for a channel of K, or three; theirs are 2 % of
    all heads together, and their V has no scales of each head."""
    x = inputs()
    codec = Gear(bits=4, backbone="kcvt", rank=4, sparsity=sparsity)
    seen = codec.decode(encode(codec, *x), codec.layer_group((0,), 4, 128, "float16"))
    theirs, backbone = golden("gear_gear_kcvt_b4_s2_r4"), golden("gear_kcvt_b4")
    keys = ("k_deq", "v_deq")
    for ours, exact, key, ratio in zip(seen, x, keys, (of_k, of_v), strict=True):
        error = relative_error(theirs[key][0], exact)
        assert relative_error(ours, exact) == pytest.approx(ratio * error, rel=0.02)
        assert relative_error(ours, exact) < 0.8 * relative_error(
            backbone[key][0], exact
        )


def test_decoquant_rebuilds_what_its_decomposition_rebuilds():
    """With one rotation and one scale for all heads together, as in the reference."""
    x = inputs()[0].float().transpose(0, 1).flatten(1)[None]  # [1, 256, 512]
    matrix = rotation(x, 16)
    turned = unrotate(x, matrix)
    side = Side(256, 512, 4, 0, Scale("row", 512, 0, center=-8))
    codes, scales, zeros = quantize.quantize_side(turned[None], side)
    seen = (codes + quantize.expand(zeros, side)) * quantize.expand(scales, side)
    ours = (seen[0, 0].unflatten(1, (-1, 16)) @ matrix[0].float()).flatten(1)
    theirs = golden("deco_n2_k_b4_j16")["recon"]
    assert relative_error(ours, x[0]) == pytest.approx(
        relative_error(theirs, x[0]), rel=0.01
    )
    assert relative_error(ours, theirs) < 0.15 * relative_error(theirs, x[0])


def test_int8_codes_and_scales_are_the_expected_ones():
    theirs, found = golden("int8_fp8"), stored(get_codec("int8"), *inputs())
    for (codes, scales), key in zip(found, "kv", strict=True):
        assert_nearly(codes - 128, theirs[f"{key}_i8"][0, :, :PREFIX], 0.001)
        by_token = scales.transpose(0, 1).flatten(1)
        assert torch.equal(by_token, theirs[f"{key}_s"][0, :, :PREFIX, 0].float())


def test_fp8_codes_are_the_expected_ones_at_the_same_scale():
    """Theirs have one scale for all tokens; where a page's is the same, so are its codes."""
    k, v = inputs()
    theirs = golden("int8_fp8")
    for x, key in ((k, "k"), (v, "v")):
        largest = (
            theirs[f"{key}_fs"][0].float() * 448
        )  # every page and head gets that number
        x[:, ::64, 0] = largest.reshape(-1, 1).expand(4, -1).half()
    for (codes, _), key in zip(stored(get_codec("fp8"), k, v), "kv", strict=True):
        found = codes.to(torch.float8_e4m3fn).view(torch.uint8)
        equal = found == theirs[f"{key}_f8"][0, :, :PREFIX]
        rest = torch.ones_like(equal)
        rest[:, ::64, 0] = False
        assert equal[rest].float().mean() > 0.999
