"""Every codec under every law: one table of codecs, one of laws."""

from dataclasses import replace

import pytest
import torch

from disagg.codecs import codec_names, get_codec
from disagg.codecs.contract import Codec, Queries, squares_by_unit, sum_lead
from disagg.codecs.quantized import QuantizedCodec
from disagg.codecs.registry import holds
from disagg.errors import ConfigError
from disagg.kernels.view import Softmax
from disagg.kv.page import FinalAt
from disagg.kv.state import allocate_group
from disagg.paged.append import RecordIds
from disagg.paged.compressed_kv import CompressedKV, GrowingArena, compress
from disagg.paged.layer import LayerRecords, PromptChunk, write_prompt
from tests.synthetic import exact_attention, realistic, relative_error

CODECS = ["raw", "raw:dtype=bf16", "kivi:bits=2,group=64,residual=64"]
CODECS += ["kivi:bits=2,group=32,residual=128", "kivi:bits=4,group=64,residual=64"]
CODECS += ["kivi:bits=4,group=32,residual=0", "kivi:bits=4,group=16,residual=64"]
CODECS += [
    "pertoken:bits=4,group=64",
    "pertoken:bits=2,group=32",
    "pertoken:bits=8,group=16",
]
CODECS += ["int8", "fp8", "kcvt:bits=4", "alignedkv"]
CODECS += ["ott:bits=2,group=128,residual=32,outliers=3,aux=32,skip_layers=0"]
CODECS += ["ott:bits=4,group=64,residual=0,outliers=1,aux=1,skip_layers=0"]
CODECS += [
    "ott:bits=2,outliers=2,skip_layers=0,rank=4",
    "ott",
    "h2o:keep=0.5",
    "h2o:keep=0.3",
]
CODECS += ["decoquant:bits=4,block=16", "decoquant:bits=8,block=32"]
CODECS += ["gear-l:bits=4,backbone=kcvt,rank=4,decode_rank=2"]
CODECS += ["gear-l:bits=2,backbone=kivi,group=64", "gear:bits=4,backbone=kcvt"]
CODECS += ["gear:bits=2,backbone=kivi,group=32,rank=4,decode_rank=4", "banded:bits=3"]
CODECS += [
    "banded:bits=2",
    "banded:bits=2,sink=0",
    "kivi:bits=2,group=64,residual=64,sink=64",
]
CODECS += [
    "kcvt:bits=4,sink=64",
    "gear:bits=2,backbone=kivi,sink=64",
    "pertoken:bits=4,sink=64",
]
CODECS += ["int8:sink=64"]
QUANTIZED = [
    (spec, head_dim)
    for spec in CODECS
    for head_dim in (16, 80, 256)
    if isinstance(get_codec(spec), QuantizedCodec)
    and holds(get_codec(spec).spec, head_dim)
]
SIZES = [  # tokens of a prompt and decoded, query heads for each KV head, head dim
    (1, 0, 1, 64),
    (63, 2, 3, 128),
    (64, 0, 4, 96),
    (65, 70, 7, 80),
    (127, 0, 8, 64),
    (129, 0, 16, 256),
    (500, 0, 7, 128),
    (1300, 0, 3, 64),
    (2200, 0, 4, 128),
    (0, 130, 3, 64),
    (300, 200, 3, 64),
    (2048, 65, 3, 64),
    (8192, 0, 2, 64),
]


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


def fits(codec: Codec, head_dim: int) -> bool:
    """Whether a codec takes this head dim; where not, it must say so by a ConfigError."""
    largest = (
        head_dim if codec.name == "ott" else 1 << 30
    )  # OTT's groups are at most a token
    if head_dim in (64, 128) or head_dim % min(codec_group(codec), largest) == 0:
        return True
    with pytest.raises(ConfigError, match=str(head_dim)):
        codec.layer_group((0,), 1, head_dim, "float16")
    return False


def codec_group(codec: Codec) -> int:
    """Channels that share a scale, where they do not have to be all of them."""
    if getattr(codec, "backbone", "") == "kcvt":
        return 1
    if codec.name == "banded":
        return 64
    return int(getattr(codec, "group", getattr(codec, "block", 1)))


def compress_prompt(codec: Codec, k: torch.Tensor, v: torch.Tensor) -> CompressedKV:
    """With queries for those that choose by attention."""
    queries = torch.randn(
        2 * k.shape[0], 1, k.shape[2], generator=torch.Generator().manual_seed(7)
    )
    return compress(codec, k, v, q=queries[:, : k.shape[1]].to(k.dtype))


def stored(cache: CompressedKV) -> bytes:
    """Every byte of the cache: pages, segments and tail."""
    runs = [
        x for run in cache.runs() for x in (run.blocks, run.segments) if x is not None
    ]
    return b"".join(x.numpy().tobytes() for x in (*runs, *cache.reconstruct()))


def test_the_table_has_every_codec():
    assert {spec.partition(":")[0] for spec in CODECS} == set(codec_names())


def test_a_spec_rebuilds_its_codec(codec):
    assert get_codec(codec.spec) == codec


@pytest.mark.parametrize(("n", "more", "per_head", "head_dim"), SIZES)
def test_attention_on_bytes_is_attention_on_what_they_rebuild(
    codec, n, more, per_head, head_dim
):
    if not fits(codec, head_dim):
        return
    k, v = realistic(2, n + more, head_dim)
    q = torch.randn(2 * per_head, head_dim, generator=torch.Generator().manual_seed(1))
    cache = compress_prompt(codec, k[:, :n], v[:, :n])
    cache.append(k[:, n:], v[:, n:])
    seen = cache.reconstruct()
    assert seen[0].shape == seen[1].shape == k.shape
    wanted = exact_attention(q, *seen, head_dim**-0.5, cache.present())
    assert relative_error(cache.attend(q), wanted) <= codec.attend_error


def test_in_fp64_attention_on_the_bytes_is_the_same_algebra(codec):
    """Pages of two segments, of a prompt and of decoding, and a tail.

    AlignedKV reads only part of the bits: no identity, so the bound that it states holds instead.
    """
    n, more = 2300, 150
    k, v = realistic(2, n + more, 64)
    cache = compress_prompt(codec, k[:, :n], v[:, :n])
    cache.append(k[:, n:], v[:, n:])
    assert cache.runs()
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(6, 64, dtype=torch.float64, generator=generator)
    wanted = exact_attention(
        q, *cache.reconstruct(torch.float64), 64**-0.5, cache.present()
    )
    seen = cache.attend(q)
    assert seen.dtype == torch.float64
    allowed = codec.attend_error if codec.name == "alignedkv" else 1e-12
    assert relative_error(seen, wanted) <= allowed


def test_sinks_and_caps_are_one_more_term_and_another_score_under_every_codec(codec):
    k, v = realistic(2, 1300, 64)
    q = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    cache, sinks = compress_prompt(codec, k, v), torch.linspace(-2, 6, 6)
    for cap in (0.0, 3.0):
        found = [cache.attend(x, Softmax(0.3, cap, sinks)) for x in (q, q.double())]
        wanted = exact_attention(
            q, *cache.reconstruct(), 0.3, cache.present(), cap, sinks
        )
        reads_all = codec.name != "alignedkv"
        assert relative_error(found[0], wanted) <= codec.attend_error
        assert relative_error(found[1], wanted) <= (
            1e-5 if reads_all else codec.attend_error
        )


def test_token_by_token_append_ends_in_the_same_bytes_as_one_compress(codec):
    if codec.final_at is not FinalAt.PAGE:
        pytest.skip("pages of this codec depend on more than their own tokens")
    k, v = realistic(2, 333, 64)
    whole = compress_prompt(codec, k, v)
    grown = compress_prompt(codec, k[:, :0], v[:, :0])
    for t in range(150):
        grown.append(k[:, t : t + 1], v[:, t : t + 1])
    grown.append(k[:, 150:], v[:, 150:])
    assert stored(grown) == stored(whole)
    assert grown.nbytes == whole.nbytes


@pytest.mark.parametrize("chunk", [97, 2100])
def test_bytes_do_not_depend_on_how_the_prompt_was_cut(codec, chunk):
    n = 2345
    k, v = realistic(2, n, 64)
    group = codec.layer_group((3,), 2, 64, "float16")
    q = torch.randn(4, n, 64, generator=torch.Generator().manual_seed(8))
    contents = []
    for step in (n, chunk):
        arena = GrowingArena(k.device)
        state = allocate_group(group, n, arena)
        before = 0
        while before < n:
            done = min(before + step, n)
            squares = sum_lead(squares_by_unit(q[:, :done], 2, 0), n)
            queries = Queries(q[:, n - 9 : done], squares)
            chunk = PromptChunk(
                k[:, :done], v[:, :done], total=n, before=before, queries=queries
            )
            records = LayerRecords(group, 3, arena.bytes)
            write_prompt(codec, records, RecordIds.of(state), chunk)
            before = done
        inventory = group.inventory(n)
        for kind, ids in state.ids_by_kind().items():
            assert len(ids) == inventory[kind]
            contents.append(
                LayerRecords(group, 3, arena.bytes).read(group.layout(kind), ids)
            )
    half = len(contents) // 2
    assert half
    assert all(
        torch.equal(a, b) for a, b in zip(contents[:half], contents[half:], strict=True)
    )


@pytest.mark.parametrize(("spec", "head_dim"), QUANTIZED)
def test_who_writes_the_planes_of_a_page_of_codes_has_written_all_of_it(spec, head_dim):
    """Kernels leave what lies between planes as it was; they write one fp32 scale as four."""
    codec = get_codec(spec)
    for page in filter(
        None, (codec.page_layout(head_dim), codec.flush_page_layout(head_dim))
    ):
        written = sum(16 if x.dtype == "float32" else x.nbytes for x in page.planes)
        assert written == page.block_bytes


def test_every_plane_of_a_block_has_its_own_bytes_and_attention_reads_them(codec):
    """A plane that nobody reads, or two that overlap, would go unnoticed elsewhere."""
    group = codec.layer_group((3,), 2, 64, "float16")
    for layout in group.layouts():
        spans = sorted((p.offset, p.offset + p.nbytes) for p in layout.planes)
        assert spans[0][0] == 0
        gaps = zip(spans, [*spans[1:], (layout.block_bytes, 0)], strict=True)
        assert all(0 <= start - end < 16 for (_, end), (start, _) in gaps)
    cache = compress_prompt(codec, *realistic(2, 700, 64))
    group, arena = cache.group, cache._arena.bytes
    q = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    whole, first = (
        cache.attend(q),
        group.address(group.page, cache._state.page_ids()[0], 0),
    )
    for plane in group.page.planes:
        if plane.name in ("k_top", "v_top"):  # of AlignedKV: how much is read, not what
            continue
        last = first + plane.offset + plane.nbytes - 1
        arena[last] ^= 0x3C
        assert not torch.equal(cache.attend(q), whole), plane.name
        arena[last] ^= 0x3C
    assert torch.equal(cache.attend(q), whole)


def test_the_reconstruction_has_every_token_in_order(codec):
    for n in (0, 1, 63, 64, 65, 130, 300):
        k, v = realistic(2, n, 64)
        cache = compress_prompt(codec, k, v)
        there = cache.present()[0]
        for original, seen in zip((k, v), cache.reconstruct(), strict=True):
            assert seen.shape == original.shape
            assert torch.isfinite(seen).all()
            if n:
                nearest = torch.cdist(original[0], seen[0]).argmin(0)
                assert (nearest == torch.arange(n))[there].float().mean() > 0.8, n


def test_any_float_dtype_is_accepted(codec):
    k, v = realistic(2, 200, 64)
    usual = relative_error(compress_prompt(codec, k, v).reconstruct()[0], k)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        seen = compress_prompt(codec, k.to(dtype), v.to(dtype)).reconstruct()[0]
        assert relative_error(seen, k) < 1.05 * usual + 2**-8, dtype


def test_hostile_values_stay_finite(codec):
    k, v = realistic(2, 256, 64)
    k[0, :, 4] = 0.0
    k[1, :, 5] += 60 * k[1, :, 5].std()  # a bias-like channel
    v[0, 9] = 0.0
    v[1, 10:20] = 65504.0
    k[1, 30:40, 6] = -65504.0
    k[0, 3, 7], k[0, 70, 9], v[0, 5, 5] = 1e5, torch.inf, -torch.inf
    k[:, 128:192] = 3.0  # a page without any range
    v[:, 128:192] = 0.0
    cache = compress_prompt(codec, k, v)
    _, seen_v = cache.reconstruct()
    assert torch.isfinite(cache.attend(torch.randn(4, 64))).all()
    assert torch.isfinite(torch.stack(cache.reconstruct())).all()
    assert not seen_v[0, 9].any()
    wide = compress_prompt(
        codec, k.bfloat16(), v.bfloat16()
    )  # the tail holds what pages cannot
    pages = slice(wide.group.sink, wide.group.sink + wide.group.sealed(256))
    assert all(torch.isfinite(seen[:, pages]).all() for seen in wide.reconstruct())


def test_attention_stays_finite_where_the_tail_cannot_hold_k_or_v(codec):
    k, v = realistic(2, 420, 64)
    k, v = 1e6 * k, 1e6 * v
    for n in (5, 170, 400):  # a tail alone, and pages with a tail
        cache = compress_prompt(codec, k[:, :n], v[:, :n])
        cache.append(k[:, n : n + 20], v[:, n : n + 20])
        q = torch.randn(4, 64, generator=torch.Generator().manual_seed(n))
        assert torch.isfinite(cache.attend(q)).all()
        assert torch.isfinite(torch.stack(cache.reconstruct())).all()


def test_infinity_in_v_that_no_query_sees_leaves_no_trace(codec):
    """K and V in the dtype of the tail are rounded too: 0 times infinity would be NaN."""
    k, v = (x.half() for x in realistic(2, 420, 64))
    v[:, [5, 300, 415]] = torch.inf
    cache = compress_prompt(codec, k[:, :400], v[:, :400])
    cache.append(k[:, 400:], v[:, 400:])
    cache.group = replace(cache.group, window=4)
    assert torch.isfinite(cache.attend(torch.randn(4, 64))).all()
