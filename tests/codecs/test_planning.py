import pytest

from disagg.codecs import codec_names, get_codec
from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import DEFAULT_CODEC
from disagg.errors import ConfigError, UnknownNameError
from disagg.kv.plan import LayerShape

SHAPE = KVShape.uniform(6, 2, 64, "float32")


@pytest.mark.parametrize(
    ("head_dim", "group"), [(64, 64), (96, 32), (80, 16), (112, 16), (128, 64)]
)
@pytest.mark.parametrize("codec", ["kivi", "gear:backbone=kivi", "pertoken"])
def test_the_default_group_is_the_largest_divisor_of_head_dim(codec, head_dim, group):
    plan = parse_plan(codec, KVShape.uniform(1, 2, head_dim, "float32"))

    assert f"group={group}" in plan.spec
    assert parse_plan(plan.spec, KVShape.uniform(1, 2, head_dim, "float32")) == plan


@pytest.mark.parametrize("codec", [name for name in codec_names() if name != "banded"])
def test_every_head_dim_of_whole_16_channels_has_a_plan(codec):
    for head_dim in range(16, 257, 16):
        assert parse_plan(codec, KVShape.uniform(1, 2, head_dim, "float32")).groups


def test_an_explicit_group_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="group=64 does not divide the head dim 80"):
        parse_plan("kivi:group=64", KVShape.uniform(1, 2, 80, "float32"))


@pytest.mark.parametrize(
    ("spec", "layers", "group_of"),
    [
        ("kivi:bits=2", [(0, 1, 2, 3, 4, 5)], (0, 0, 0, 0, 0, 0)),
        (
            "0-1,5:kivi:bits=4;2-4:kivi:bits=2",
            [(0, 1, 5), (2, 3, 4)],
            (0, 0, 1, 1, 1, 0),
        ),
        ("0:raw;1-:kivi", [(0,), (1, 2, 3, 4, 5)], (0, 1, 1, 1, 1, 1)),
    ],
)
def test_layers_may_have_codecs_of_their_own(spec, layers, group_of):
    plan = parse_plan(spec, SHAPE)

    assert [group.layers for group in plan.groups] == layers
    assert plan.group_of == group_of


def test_layers_with_another_window_form_another_group():
    shape = KVShape.uniform(4, 2, 64, "float32", (None, 512, None, 512))
    plan = parse_plan("kivi", shape)
    groups = [(group.layers, group.window) for group in plan.groups]

    assert groups == [((0, 2), None), ((1, 3), 512)]


def test_layers_with_other_heads_form_another_group():
    narrow = LayerShape(heads=8, head_dim=64, window=512)
    wide = LayerShape(heads=2, head_dim=256)
    plan = parse_plan("raw", KVShape((narrow, wide, narrow, narrow), "float16"))
    groups = [(group.layers, group.heads, group.head_dim) for group in plan.groups]

    assert groups == [((0, 2, 3), 8, 64), ((1,), 2, 256)]
    assert plan.spec == "0,2,3:raw:dtype=fp16;1:raw:dtype=fp16"
    assert plan.numbers(1000) == 2 * (3 * 8 * 64 * 512 + 2 * 256 * 1000)


def test_each_layer_takes_the_first_choice_that_holds_its_heads():
    shape = KVShape((LayerShape(4, 192), LayerShape(2, 128)), "float16")

    codecs = [group.codec for group in parse_plan("banded:bits=2|kivi", shape).groups]

    assert codecs == [get_codec("kivi").spec, get_codec("banded:bits=2").spec]


def test_raw_follows_the_dtype_of_the_model():
    (group,) = parse_plan("raw", SHAPE).groups

    assert group.codec == "raw:dtype=fp32"
    assert group.page == group.raw
    assert parse_plan("kivi", SHAPE).groups[0].raw.plane("k").dtype == "float16"


WRONG = [
    ("", "the codec spec is empty"),
    ("0-3:raw", r"layers \[4, 5\] have no codec"),
    ("0-3:raw;3-:kivi", "layer 3 has two codecs"),
    ("0-9:raw", "outside the model's layers 0-5"),
    ("0-x:raw", "not a layer or range"),
    ("0.5", "'0.5' in '0.5' names no codec"),
    ("²-:raw", "not a layer or range"),
    ("0-²:raw", "not a layer or range"),
    ("٣-:raw", "not a layer or range"),
    ("3-1:raw", "outside the model's layers"),
]


@pytest.mark.parametrize(("spec", "message"), WRONG)
def test_a_plan_that_cannot_be_says_why(spec, message):
    with pytest.raises(ConfigError, match=message):
        parse_plan(spec, SHAPE)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("kiwi:bits=2", UnknownNameError, "unknown codec 'kiwi'; known: .*kivi.*raw"),
        (
            "kivi:bit=2",
            UnknownNameError,
            "unknown option of codec kivi 'bit'; known: bits, group",
        ),
        ("kivi:bits=3", ConfigError, "kivi:bits is 3; 2 and 4 are known"),
        (
            "kivi:bits=two",
            ConfigError,
            "option bits of codec kivi is 'two'; expected a number",
        ),
        ("kivi:bits", ConfigError, "option 'bits' of codec kivi has no value"),
        ("kivi:bits=2,bits=4", ConfigError, "given twice"),
        (
            "kivi:residual=-16",
            ConfigError,
            "kivi:residual is -16; expected a multiple of 16 tokens",
        ),
        ("gear:sparsity=0.02", ConfigError, "a multiple of 1/64"),
        ("gear:sparsity=0", ConfigError, "1/64"),
        ("gear:sparsity=0.3", ConfigError, "1/64"),
        ("ott:rank=17", ConfigError, "ott:rank is 17; expected 0 to 16"),
        (
            "raw:dtype=fp8",
            ConfigError,
            "raw:dtype is 'fp8'; model, fp16, bf16 and fp32 are known",
        ),
    ],
)
def test_a_spec_that_cannot_be_says_what_would_be_right(spec, error, message):
    with pytest.raises(error, match=message):
        get_codec(spec)


LONG = 3000 * "9"
TOO_LONG = [LONG, "x" + LONG, "raw:" + LONG, "kivi:bits=" + LONG, "raw:dtype=" + LONG]
TOO_LONG += [
    LONG + ":raw",
    f"0-{LONG}:raw",
    f"{LONG}:",
    999 * "0:raw;",
    999 * "bits=2,",
]
TOO_LONG += ["kivi:" + 999 * "bits=2,"]


@pytest.mark.parametrize("spec", TOO_LONG, ids=lambda spec: spec[:12])
def test_what_is_said_of_a_spec_is_short_however_long_it_is(spec):
    with pytest.raises(ConfigError) as refused:
        parse_plan(spec, SHAPE)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("head_dim", "codec"),
    [
        (64, "banded:bits=3"),
        (128, "banded:bits=3"),
        (192, "kivi:bits=4,group=64,residual=64"),
    ],
)
def test_the_default_is_banded_and_kivi_where_that_has_no_bands(head_dim, codec):
    shape = KVShape.uniform(6, 2, head_dim, "float32")

    assert parse_plan(DEFAULT_CODEC, shape).spec == codec
    with pytest.raises(ConfigError, match="40, which raw holds"):
        parse_plan(DEFAULT_CODEC, KVShape.uniform(6, 2, 40, "float32"))


def test_another_choice_hides_no_mistake_in_the_first():
    with pytest.raises(ConfigError, match="bits is 7"):
        parse_plan("banded:bits=7|kivi", SHAPE)
