"""What `models check` says of a model is what the engine then does with it."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import slabs
from benchmarks.slabs import MODELS
from disagg.cli.models import parse_bytes
from disagg.codecs import codec_names
from disagg.codecs.planning import parse_plan
from disagg.config import DEFAULT_CODEC
from disagg.errors import ConfigError, ModelError
from disagg.kv.page import INT8, make_state_layout
from disagg.kv.slabs import SlabAllocator
from disagg.model import capacity
from disagg.model.capacity import check_model, kv_shape, split_memory, tokens_that_fit
from disagg.model.describe import describe_model
from tests.model.test_describe import write
from tests.model.tiny import save_config, save_tiny

LLAMA_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LLAMA_8B |= {
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


def test_an_8b_on_80_gb_holds_hundreds_of_thousands_of_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, **LLAMA_8B)

    fit = check_model(path, memory=80 * 10**9)

    assert fit.exact_bytes_per_token == 2 * 2 * 32 * 8 * 128

    tokens = {codec.spec.partition(":")[0]: codec.tokens for codec in fit.codecs}

    assert tokens["raw"] == pytest.approx(tokens["fp8"] / 2, rel=0.01)
    assert tokens["raw"] > 250_000
    assert tokens["kivi"] > 1_500_000
    assert fit.recommended == "banded:bits=3"


def test_each_rank_has_room_beside_the_whole_embedding(tmp_path, monkeypatch):
    """Eight ranks of 16 GB have an eighth of it each, but the embedding of 1 GB is not divided."""
    path = write(tmp_path, vocab_size=128256, **LLAMA_8B)
    monkeypatch.setattr(capacity, "_weights_bytes", lambda info, config: 16 * 10**9)

    tight, ample = (
        check_model(path, memory=nbytes, share=1.0, ranks=8)
        for nbytes in (29 * 10**8, 36 * 10**8)
    )

    assert all(not codec.tokens for codec in tight.codecs)
    assert any(codec.tokens for codec in ample.codecs)


def test_a_70b_on_four_ranks_holds_what_is_left_beside_its_weights(tmp_path):
    """Of 72 GB a rank has an embedding of 2.10 GB and a quarter of 139.01 GB of other weights.

    One prompt of 131,072 tokens is computed beside the pages. Exact KV takes 81,920 bytes a token.
    """
    path = write(tmp_path, **LLAMA_70B)

    fit = check_model(path, memory=80 * 10**9, ranks=4)

    assert fit.config_weights_bytes == 141_107_412_992
    (raw,) = (codec for codec in fit.codecs if codec.spec.startswith("raw"))
    assert raw.bytes_per_token == 81_920
    of_rank = 2_101_346_304 + (141_107_412_992 - 2_101_346_304) // 4
    pages = 72 * 10**9 - of_rank - 131_072 * 81_920
    assert raw.tokens == pytest.approx(pages / 81_920, rel=0.01)


def test_more_ranks_than_kv_heads_are_refused_by_the_check(tmp_path):
    fit = check_model(write(tmp_path, **LLAMA_70B), ranks=16)

    assert not fit.served
    assert "has 8 KV heads, which 16 ranks cannot share equally" in fit.reason


def test_every_codec_has_a_row_or_says_why_not(tmp_path: Path) -> None:
    fit = check_model(write(tmp_path, hidden_size=320))  # heads of 80

    assert len(fit.codecs) == 1 + len(codec_names())

    refused = [codec for codec in fit.codecs if codec.refused]

    assert [codec.spec for codec in refused] == ["banded"]
    assert "head dim is 80" in refused[0].refused
    assert fit.recommended == "kivi:bits=4,group=16,residual=64"


CHUNK = 2048


def chunked_model(folder: Path) -> str:
    """Three layers of four see chunks only."""
    sizes = {"attention_chunk_size": CHUNK, "max_position_embeddings": 8 * CHUNK}
    return str(save_config("llama4_text", folder, **sizes))


@pytest.mark.parametrize("spec", ["raw", "int8"])
def test_a_context_that_ends_with_a_chunk_holds_no_fewer_tokens(spec, tmp_path):
    """At that very length its layers need nothing of it; a token before, all of it."""
    path, memory = chunked_model(tmp_path), 1 << 30
    ends, before = (
        check_model(path, memory=memory, context=n) for n in (CHUNK, CHUNK - 1)
    )

    (at_end,) = (x for x in ends.codecs if x.spec.startswith(spec))
    (within,) = (x for x in before.codecs if x.spec.startswith(spec))

    assert at_end.bytes_per_token == pytest.approx(within.bytes_per_token)
    assert at_end.tokens == pytest.approx(within.tokens, rel=0.01)


def test_a_codec_of_all_layers_has_its_own_name_where_shapes_differ(tmp_path):
    fit = check_model(chunked_model(tmp_path))

    names = [codec.spec for codec in fit.codecs]

    assert "int8" in names
    assert not [name for name in names if name[0].isdigit()]
    assert not fit.recommended[0].isdigit()


def test_states_are_shown_beside_the_bytes_of_tokens(tmp_path: Path) -> None:
    path = str(save_config("qwen3_5_text", tmp_path))
    shape = kv_shape(describe_model(path))

    fit = check_model(path)

    assert (fit.num_layers, fit.num_states) == (1, 3)
    assert fit.state_bytes == shape.state_bytes
    raw = next(codec for codec in fit.codecs if codec.spec.startswith("raw"))
    assert raw.bytes_per_token == fit.exact_bytes_per_token
    assert raw.state_tokens == round(shape.state_bytes / raw.bytes_per_token)


def test_states_are_compared_with_tokens_as_both_are_sent(tmp_path: Path) -> None:
    fit = check_model(str(save_config("qwen3_5_text", tmp_path)))

    sent = fit.wire_state_bytes
    assert sent["exact"] == fit.state_bytes > sent["bf16"] > sent["int8"]
    int8 = next(codec for codec in fit.codecs if codec.spec == "int8")
    assert int8.state_tokens == round(sent["int8"] / int8.bytes_per_token)


def test_the_command_says_how_large_states_are(tmp_path, disagg):
    path = save_config("lfm2", tmp_path)

    output = disagg("models check", path).out

    assert "states: 0.0 MB a sequence in 3 layers" in output
    assert "handed off: 0.0 MB exact, 0.0 MB bf16, 0.0 MB int8" in output
    assert "tokens as large as the states" in " ".join(output.split())


@pytest.mark.parametrize("model", MODELS)
def test_an_arena_holds_what_its_bytes_promise(model: str) -> None:
    arena_bytes = 1 << 30 if model in ("Qwen2.5 7B", "SmolLM2 135M") else 6 << 30

    for row in slabs.compare(model, arena_bytes, tokens=2048):
        assert row["held_of_promised"] == pytest.approx(1, abs=0.03), row
        assert row["used"] > 0.97, row


def test_small_arenas_have_room_for_every_shape_of_records() -> None:
    row = slabs.fill_row(
        "Llama 3.1 8B", 256 << 20, 2048, DEFAULT_CODEC, [DEFAULT_CODEC]
    )

    assert row["held_of_promised"] > 0.97
    assert row["used"] > 0.8


def test_any_codec_fits_the_slabs_that_suit_another() -> None:
    for spec in (*slabs.CODECS, "alignedkv", "h2o"):
        row = slabs.fill_row("Llama 3.1 8B", 1 << 30, 2048, spec, ["banded:bits=2"])

        assert row["held_tokens"] >= 2048


def test_as_many_tokens_fit_as_slabs_hold_and_not_one_more() -> None:
    plan = parse_plan(DEFAULT_CODEC, MODELS["SmolLM2 135M"])
    room = SlabAllocator(64 << 20, 1 << 20)

    fitting = tokens_that_fit(plan, room, 2048)

    num_prompts, rest = divmod(fitting, 2048)
    whole = Counter({x: num_prompts * n for x, n in plan.records(2048).items()})
    assert room.has_room(whole + plan.records(rest))
    assert not room.has_room(whole + plan.records(rest + 1))


@pytest.mark.parametrize("num_slabs", range(45, 50))
def test_as_many_rounded_states_fit_as_are_admitted_one_by_one(num_slabs: int) -> None:
    """Each needs its wire record first, the last one too."""
    state = make_state_layout([("recurrent0", "float32", (8, 64, 64))])
    shape = replace(MODELS["SmolLM2 135M"], states=(state,) * 6, state_form=INT8)
    plan = parse_plan(DEFAULT_CODEC, shape)
    records, context = plan.records(2048), 2048
    room = SlabAllocator(num_slabs << 20, 1 << 20)
    fitting = tokens_that_fit(plan, room, context)

    num_admitted = 0
    while room.has_room(records):
        pages = {x: room.allocate(x, count) for x, count in records.items()}
        for record, count in (records - plan.resident_records(context)).items():
            for page in pages[record][:count]:
                room.disown(page)
                room.free(page)
        num_admitted += 1

    assert fitting // context <= num_admitted


def test_workspaces_take_the_longest_prompts_need_or_a_third(
    tmp_path: Path,
) -> None:
    info = describe_model(write(tmp_path, **LLAMA_8B), device="cuda")
    arena, workspace = split_memory(57_600_000_000, kv_shape(info), info.context_length)

    assert workspace == 131072 * 131072
    assert arena + workspace == 57_600_000_000

    arena, workspace = split_memory(9 * 10**9, kv_shape(info), info.context_length)

    assert (arena, workspace) == (6 * 10**9, 3 * 10**9)


def test_the_command_prints_one_line_and_exits_as_a_model_error(tmp_path, disagg):
    path = write(
        tmp_path, layer_types=["linear_attention"] * 3, model_type="qwen3_next"
    )
    (line,) = disagg("models check", path, code=ModelError.exit_code).out.splitlines()

    assert line.endswith("not served: qwen3_next has no attention layer: not supported")

    output = disagg("models check --json", path, code=ModelError.exit_code).out

    assert not json.loads(output)["served"]


def test_the_command_needs_no_weights(tmp_path, disagg):
    path = write(tmp_path, **LLAMA_8B)
    as_json = disagg("models check", path, "--memory", "24GiB", "--json").out

    fit = json.loads(as_json)

    assert fit["served"]
    assert all(codec["tokens"] > 0 for codec in fit["codecs"])

    text = disagg("models check", path).out

    assert "recommended: banded:bits=3" in text
    assert text.count("banded:bits=3") == 2
    assert "tokens that fit" not in text
    assert "--memory 24GiB" in text


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("generation_config.json", '{"temperature": "hot"}', "temperature is 'hot'"),
        ("tokenizer_config.json", '{"chat_template": 5}', "is not text"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
    ],
)
def test_files_that_serve_refuses_are_refused(file, content, reason, tmp_path, disagg):
    folder = save_tiny("llama", tmp_path / "model", num_hidden_layers=1)

    assert "served" in disagg("models check", str(folder)).out

    (folder / file).write_text(content)
    (line,) = disagg("models check", str(folder), code=3).out.splitlines()

    assert "not served: " in line
    assert reason in line


def test_sizes_are_written_with_units() -> None:
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("1.5 GiB") == 3 << 29

    for wrong in ("much", "80XB", "1.2.3GB", ""):
        with pytest.raises(ConfigError, match="expected 80GB or 24GiB"):
            parse_bytes(wrong)


# strings, ints and floats that transformers refuses by an exception of its own
STRICT = {"rms_norm_eps": 0, "attention_dropout": "no"}


WRONG = [
    {"text_config": 3},
    {"num_attention_heads": "four"},
    STRICT,
    STRICT
    | {"num_key_value_heads": "absent", "head_dim": "absent", "model_type": "qwen3"},
    {"num_attention_heads": 0},
    {"num_hidden_layers": -3},
    {"num_key_value_heads": "two"},
    {"layer_types": 5},
    {"rope_scaling": 5},
    {"architectures": [5]},
]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_a_config_that_makes_no_sense_is_a_refusal(changes, tmp_path):
    fit = check_model(write(tmp_path, **changes))

    assert not fit.served
    assert fit.reason
