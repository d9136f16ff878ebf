"""Every codec under every law: one table of codecs, one of laws."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from disagg.codecs import codec_names, get_codec
from disagg.codecs.contract import Codec, Queries, squares_by_unit, sum_lead
from disagg.codecs.quantized import QuantizedCodec
from disagg.codecs.registry import holds
from disagg.errors import ConfigError
from disagg.kernels.view import Softmax
from disagg.kv.page import FinalAt, Kind
from disagg.kv.state import allocate_group
from disagg.paged.append import RecordIds
from disagg.paged.compressed_kv import CompressedKV, GrowingArena, compress
from disagg.paged.layer import LayerRecords, PromptChunk, write_prompt
from tests.synthetic import exact_attention, gaussian, realistic, relative_error

KIVI = "kivi:bits=2,group=64,residual=64"
OTT = "ott:bits=2,group=128,residual=32,outliers=3,aux=32,skip_layers=0"
CODECS = {
    "raw": "raw",
    "raw-bf16": "raw:dtype=bf16",
    "kivi-2": KIVI,
    "kivi-2-g32": "kivi:bits=2,group=32,residual=128",
    "kivi-4": "kivi:bits=4,group=64,residual=64",
    "kivi-4-g32-no-residual": "kivi:bits=4,group=32,residual=0",
    "kivi-4-g16": "kivi:bits=4,group=16,residual=64",
    "kivi-2-sink": f"{KIVI},sink=64",
    "pertoken-4": "pertoken:bits=4,group=64",
    "pertoken-2-g32": "pertoken:bits=2,group=32",
    "pertoken-8-g16": "pertoken:bits=8,group=16",
    "pertoken-4-sink": "pertoken:bits=4,sink=64",
    "int8": "int8",
    "int8-sink": "int8:sink=64",
    "fp8": "fp8",
    "kcvt-4": "kcvt:bits=4",
    "kcvt-4-sink": "kcvt:bits=4,sink=64",
    "alignedkv": "alignedkv",
    "ott": "ott",
    "ott-2-g128": OTT,
    "ott-4-few-slots": "ott:bits=4,group=64,residual=0,outliers=1,aux=1,skip_layers=0",
    "ott-2-rank": "ott:bits=2,outliers=2,skip_layers=0,rank=4",
    "h2o-half": "h2o:keep=0.5",
    "h2o-third": "h2o:keep=0.3",
    "decoquant-4": "decoquant:bits=4,block=16",
    "decoquant-8-b32": "decoquant:bits=8,block=32",
    "gear-l-4-kcvt": "gear-l:bits=4,backbone=kcvt,rank=4,decode_rank=2",
    "gear-l-2-kivi": "gear-l:bits=2,backbone=kivi,group=64",
    "gear-4-kcvt": "gear:bits=4,backbone=kcvt",
    "gear-2-kivi-g32": "gear:bits=2,backbone=kivi,group=32,rank=4,decode_rank=4",
    "gear-2-kivi-sink": "gear:bits=2,backbone=kivi,sink=64",
    "banded-3": "banded:bits=3",
    "banded-2": "banded:bits=2",
    "banded-2-no-sink": "banded:bits=2,sink=0",
}
QUANTIZED = [
    pytest.param(spec, head_dim, id=f"{name}-D{head_dim}")
    for name, spec in CODECS.items()
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


@pytest.fixture(params=CODECS.values(), ids=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param)


def fits(codec: Codec, head_dim: int) -> bool:
    """Whether a codec takes this head dim; where not, it must say so by a ConfigError."""
    group = codec_group(codec)
    if codec.name == "ott":
        group = min(group, head_dim)  # OTT's groups are at most a token
    if head_dim in (64, 128) or head_dim % group == 0:
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


def compress_prompt(codec: Codec, k: Tensor, v: Tensor) -> CompressedKV:
    """With queries for those that choose by attention."""
    heads, n, head_dim = k.shape
    queries = gaussian(2 * heads, 1, head_dim, seed=7)
    return compress(codec, k, v, q=queries[:, :n].to(k.dtype))


def prefill_and_decode(codec: Codec, k: Tensor, v: Tensor, prompt: int) -> CompressedKV:
    """The first `prompt` tokens compressed as a prompt, the others appended."""
    cache = compress_prompt(codec, k[:, :prompt], v[:, :prompt])
    cache.append(k[:, prompt:], v[:, prompt:])
    return cache


def stored(cache: CompressedKV) -> bytes:
    """Every byte of the cache: pages, segments and tail."""
    tensors = []
    for run in cache.runs():
        tensors.append(run.blocks)
        if run.segments is not None:
            tensors.append(run.segments)
    tensors += cache.reconstruct()
    return b"".join(x.numpy().tobytes() for x in tensors)


def test_the_table_has_every_codec():
    names = {spec.partition(":")[0] for spec in CODECS.values()}
    assert names == set(codec_names())


def test_a_spec_rebuilds_its_codec(codec):
    assert get_codec(codec.spec) == codec


@pytest.mark.parametrize(("n", "more", "per_head", "head_dim"), SIZES)
def test_attention_on_bytes_is_attention_on_what_they_rebuild(
    codec, n, more, per_head, head_dim
):
    if not fits(codec, head_dim):
        return
    k, v = realistic(2, n + more, head_dim)
    q = gaussian(2 * per_head, head_dim, seed=1)
    cache = prefill_and_decode(codec, k, v, prompt=n)

    new_k, new_v = cache.reconstruct()
    assert new_k.shape == new_v.shape == k.shape
    expected = exact_attention(q, new_k, new_v, head_dim**-0.5, cache.present())
    assert relative_error(cache.attend(q), expected) <= codec.attend_error


def test_in_fp64_attention_on_the_bytes_is_the_same_algebra(codec):
    """Pages of two segments, of a prompt and of decoding, and a tail.

    AlignedKV reads only part of the bits: no identity, so the bound that it states holds instead.
    """
    k, v = realistic(2, 2300 + 150, 64)
    cache = prefill_and_decode(codec, k, v, prompt=2300)
    assert cache.runs()
    source = torch.Generator().manual_seed(4)
    q = torch.randn(6, 64, dtype=torch.float64, generator=source)

    o = cache.attend(q)
    assert o.dtype == torch.float64
    exact = cache.reconstruct(torch.float64)
    expected = exact_attention(q, *exact, 64**-0.5, cache.present())
    bound = codec.attend_error if codec.name == "alignedkv" else 1e-12
    assert relative_error(o, expected) <= bound


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_attention_sinks_and_caps_hold_under_every_codec(codec, cap):
    """A sink is one more term of a softmax, a cap another score."""
    k, v = realistic(2, 1300, 64)
    q = gaussian(6, 64, seed=1)
    cache = compress_prompt(codec, k, v)
    sinks = torch.linspace(-2, 6, 6)

    softmax = Softmax(0.3, cap, sinks)
    exact = cache.reconstruct()
    expected = exact_attention(q, *exact, 0.3, cache.present(), cap, sinks)
    o = cache.attend(q, softmax)
    assert relative_error(o, expected) <= codec.attend_error

    bound = codec.attend_error if codec.name == "alignedkv" else 1e-5
    o = cache.attend(q.double(), softmax)
    assert relative_error(o, expected) <= bound


def test_appending_tokens_one_by_one_ends_in_the_same_bytes(codec):
    if codec.final_at is not FinalAt.PAGE:
        pytest.skip("pages of this codec depend on more than their own tokens")
    k, v = realistic(2, 333, 64)
    whole = compress_prompt(codec, k, v)

    appended = compress_prompt(codec, k[:, :0], v[:, :0])
    for t in range(150):
        appended.append(k[:, t : t + 1], v[:, t : t + 1])
    appended.append(k[:, 150:], v[:, 150:])

    assert stored(appended) == stored(whole)
    assert appended.nbytes == whole.nbytes


def prefill_in_chunks(codec: Codec, n: int, chunk: int) -> list[Tensor]:
    """The blocks of every kind of record of a prompt that is computed in chunks."""
    layer, heads = 3, 2
    k, v = realistic(heads, n, 64)
    q = gaussian(4, n, 64, seed=8)
    group = codec.layer_group((layer,), heads, 64, "float16")
    arena = GrowingArena(k.device)
    state = allocate_group(group, n, arena)
    records = LayerRecords(group, layer, arena.bytes)
    for before in range(0, n, chunk):
        done = min(before + chunk, n)
        squares = sum_lead(squares_by_unit(q[:, :done], heads, 0), n)
        computed = PromptChunk(
            k[:, :done],
            v[:, :done],
            total=n,
            before=before,
            queries=Queries(q[:, n - 9 : done], squares),
        )
        write_prompt(codec, records, RecordIds.of(state), computed)

    inventory = group.inventory(n)
    contents = []
    for kind, ids in state.ids_by_kind().items():
        assert len(ids) == inventory[kind]
        contents.append(records.read(group.layout(kind), ids))
    return contents


def blocks_of_heads(codec: Codec, heads: range, n: int, more: int) -> list[Tensor]:
    """The blocks [P, H, bytes] of a prompt and what decode appends, of some of four heads."""
    layer = 3
    k, v = realistic(4, n + more, 64)
    q = gaussian(8, n, 64, seed=8)[2 * heads.start : 2 * heads.stop]
    k, v = k[heads.start : heads.stop], v[heads.start : heads.stop]
    whole_group = codec.layer_group((layer,), len(heads), 64, "float16")
    group = replace(whole_group, first_head=heads.start)
    arena = GrowingArena(k.device)
    state = allocate_group(group, n, arena)
    queries = Queries.of(q, len(heads), n)
    prompt = PromptChunk(k[:, :n], v[:, :n], total=n, queries=queries)
    records = LayerRecords(group, layer, arena.bytes)
    write_prompt(codec, records, RecordIds.of(state), prompt)
    cache = CompressedKV(codec, group, state, arena, n)
    cache.append(k[:, n:], v[:, n:])

    records = LayerRecords(group, layer, arena.bytes)
    blocks = [records.read(run.layout, run.pages) for run in state.runs]
    for kind in (Kind.SEGMENT, Kind.SIDE, Kind.RAW):
        if ids := state.ids_by_kind().get(kind):
            blocks.append(records.read(group.layout(kind), ids))
    return blocks


@pytest.mark.parametrize("n", [40, 700])
def test_the_bytes_of_a_head_do_not_depend_on_its_neighbours(codec, n):
    """So the ranks of a group write what one worker would: each the blocks of its heads."""
    whole = blocks_of_heads(codec, range(4), n, more=150)
    first = blocks_of_heads(codec, range(2), n, more=150)
    second = blocks_of_heads(codec, range(2, 4), n, more=150)

    assert whole
    for blocks, *halves in zip(whole, first, second, strict=True):
        assert torch.equal(blocks, torch.cat(halves, 1))


@pytest.mark.parametrize("chunk", [97, 2100])
def test_bytes_do_not_depend_on_how_the_prompt_was_cut(codec, chunk):
    n = 2345
    whole = prefill_in_chunks(codec, n, chunk=n)
    cut = prefill_in_chunks(codec, n, chunk)

    assert whole
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("spec", "head_dim"), QUANTIZED)
def test_the_planes_of_a_page_of_codes_are_all_of_its_bytes(spec, head_dim):
    """Kernels leave what lies between planes as it was; they write one fp32 scale as four."""
    codec = get_codec(spec)
    pages = (codec.page_layout(head_dim), codec.flush_page_layout(head_dim))
    for page in filter(None, pages):
        sizes = [16 if x.dtype == "float32" else x.nbytes for x in page.planes]
        assert sum(sizes) == page.block_bytes


def test_planes_of_a_block_do_not_overlap(codec):
    group = codec.layer_group((3,), 2, 64, "float16")
    for layout in group.layouts():
        end = 0
        for plane in sorted(layout.planes, key=lambda plane: plane.offset):
            assert 0 <= plane.offset - end < 16
            end = plane.offset + plane.nbytes
        assert 0 <= layout.block_bytes - end < 16
        assert min(plane.offset for plane in layout.planes) == 0


def test_attention_reads_every_plane(codec):
    """A plane that nothing reads would go unnoticed elsewhere."""
    cache = compress_prompt(codec, *realistic(2, 700, 64))
    group, arena = cache.group, cache._arena.bytes
    q = gaussian(4, 64, seed=5)
    o = cache.attend(q)

    first = group.address(group.page, cache._state.page_ids()[0], 0)
    for plane in group.page.planes:
        if plane.name in ("k_top", "v_top"):  # of AlignedKV: how much is read, not what
            continue
        last = first + plane.offset + plane.nbytes - 1
        arena[last] ^= 0x3C
        assert not torch.equal(cache.attend(q), o), plane.name
        arena[last] ^= 0x3C
    assert torch.equal(cache.attend(q), o)


def test_the_reconstruction_has_every_token_in_order(codec):
    for n in (0, 1, 63, 64, 65, 130, 300):
        k, v = realistic(2, n, 64)
        cache = compress_prompt(codec, k, v)
        present = cache.present()[0]
        for exact, rebuilt in zip((k, v), cache.reconstruct(), strict=True):
            assert rebuilt.shape == exact.shape
            assert torch.isfinite(rebuilt).all()
            if n:
                nearest = torch.cdist(exact[0], rebuilt[0]).argmin(0)
                in_place = nearest == torch.arange(n)
                assert in_place[present].float().mean() > 0.8, n


def test_any_float_dtype_is_accepted(codec):
    k, v = realistic(2, 200, 64)
    rebuilt, _ = compress_prompt(codec, k, v).reconstruct()
    fp32_error = relative_error(rebuilt, k)

    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        cache = compress_prompt(codec, k.to(dtype), v.to(dtype))
        rebuilt, _ = cache.reconstruct()
        assert relative_error(rebuilt, k) < 1.05 * fp32_error + 2**-8, dtype


def hostile_values() -> tuple[Tensor, Tensor]:
    k, v = realistic(2, 256, 64)
    k[0, :, 4] = 0.0
    k[1, :, 5] += 60 * k[1, :, 5].std()  # a bias-like channel
    v[0, 9] = 0.0
    v[1, 10:20] = 65504.0
    k[1, 30:40, 6] = -65504.0
    k[0, 3, 7] = 1e5
    k[0, 70, 9] = torch.inf
    v[0, 5, 5] = -torch.inf
    k[:, 128:192] = 3.0  # a page without any range
    v[:, 128:192] = 0.0
    return k, v


def test_hostile_values_stay_finite(codec):
    cache = compress_prompt(codec, *hostile_values())
    new_k, new_v = cache.reconstruct()

    assert torch.isfinite(cache.attend(torch.randn(4, 64))).all()
    assert torch.isfinite(new_k).all()
    assert torch.isfinite(new_v).all()
    assert not new_v[0, 9].any()


def test_pages_are_finite_where_the_tail_is_bfloat16(codec):
    """The tail holds what pages cannot."""
    k, v = hostile_values()
    cache = compress_prompt(codec, k.bfloat16(), v.bfloat16())
    sink = cache.group.sink
    pages = slice(sink, sink + cache.group.sealed(256))
    for rebuilt in cache.reconstruct():
        assert torch.isfinite(rebuilt[:, pages]).all()


def test_attention_stays_finite_when_k_or_v_overflow_the_tail(codec):
    k, v = (1e6 * x for x in realistic(2, 420, 64))
    for n in (5, 170, 400):  # a tail alone, and pages with a tail
        cache = prefill_and_decode(codec, k[:, : n + 20], v[:, : n + 20], prompt=n)
        q = gaussian(4, 64, seed=n)
        assert torch.isfinite(cache.attend(q)).all()
        assert torch.isfinite(torch.stack(cache.reconstruct())).all()


def test_infinity_in_v_that_no_query_sees_leaves_no_trace(codec):
    """K and V in the dtype of the tail are rounded too: 0 times infinity would be NaN."""
    k, v = realistic(2, 420, 64, dtype=torch.float16)
    v[:, [5, 300, 415]] = torch.inf
    cache = prefill_and_decode(codec, k, v, prompt=400)

    cache.group = replace(cache.group, window=4)

    assert torch.isfinite(cache.attend(torch.randn(4, 64))).all()
