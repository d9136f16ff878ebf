"""Whichever file names it, an end token ends answers; words of ordinary text never do."""

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ModelError
from disagg.model.end_tokens import end_tokens

VOCAB = 100
ADDED = {"id": 7, "content": "<|im_end|>", "special": True}
TOKENIZER = {
    "added_tokens": [{"id": 3, "content": "<eos>"}, ADDED],
    "model": {"vocab": {"#": 2, "a": 5}},
}
UNIGRAM = {"added_tokens": [], "model": {"vocab": [["a", -1.0], ["</s>", 0.0]]}}


def ends(folder: Path, config: dict[str, Any], **files: Any) -> tuple[int, ...]:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return end_tokens(folder, config, VOCAB)


def test_the_tokens_of_every_file_count_once(tmp_path):
    ids = ends(
        tmp_path,
        {"eos_token_id": [3, 7], "text_config": {"eos_token_id": 9}},
        generation_config={"eos_token_id": 3},
        tokenizer_config={"eos_token": "a"},
        tokenizer=TOKENIZER | {"added_tokens": []},
    )

    assert ids == (3, 5, 7, 9)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<|im_end|>"}, "tokenizer": TOKENIZER},
        {
            "tokenizer_config": {"eos_token": {"content": "<|im_end|>"}},
            "tokenizer": TOKENIZER,
        },
        {
            "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}},
            "tokenizer": TOKENIZER,
        },
        {
            "tokenizer_config": {
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": {"7": ADDED},
            }
        },
    ],
    ids=["text", "object", "special-tokens-map", "small-file"],
)
def test_a_token_that_only_the_tokenizer_names_ends_answers(files, tmp_path):
    assert ends(tmp_path, {}, generation_config={"eos_token_id": 3}, **files) == (3, 7)


def test_lists_of_words_are_vocabularies_too(tmp_path):
    files = {"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": UNIGRAM}

    assert ends(tmp_path, {}, **files) == (1,)


def test_an_ordinary_word_that_only_the_config_names_ends_nothing(tmp_path):
    """As in nvidia/MiniMax-M2.5-NVFP4: 2 is the default of the architecture's class."""
    config = {"eos_token_id": 2}
    files = {"generation_config": {"eos_token_id": 7}, "tokenizer": TOKENIZER}

    assert ends(tmp_path, config, **files) == (7,)
    assert ends(tmp_path, config, generation_config={"eos_token_id": 2}) == (2,)


def test_ids_outside_the_vocabulary_stand_for_none(tmp_path):
    for none in (-1, None, [-1, VOCAB]):
        assert ends(tmp_path, {}, generation_config={"eos_token_id": none}) == ()


@pytest.mark.parametrize("wrong", [["0", 1], "2", 1.5, True, [[1]], {"id": 1}], ids=str)
def test_what_is_no_token_id_is_refused_with_its_file(wrong, tmp_path):
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is"):
        ends(tmp_path, {}, generation_config={"eos_token_id": wrong})

    with pytest.raises(ModelError, match=r"config\.json: eos_token_id is"):
        ends(tmp_path, {"eos_token_id": wrong}, generation_config={})


@pytest.mark.parametrize(
    "tokenizer",
    [{"added_tokens": [5]}, {"added_tokens": 5}, {"model": {"vocab": [5]}}],
    ids=str,
)
def test_a_tokenizer_of_another_form_is_refused(tokenizer, tmp_path):
    files = {"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": tokenizer}

    with pytest.raises(ModelError, match="make no sense"):
        ends(tmp_path, {}, **files)


def test_gpt_oss_ends_messages_in_two_ways(tmp_path):
    names = ["<|return|>", "<|call|>", "<|end|>"]
    added = [{"id": number, "content": name} for number, name in enumerate(names)]
    files = {"tokenizer": {"added_tokens": added}}

    assert ends(tmp_path, {"model_type": "gpt_oss", "eos_token_id": 0}, **files) == (
        0,
        1,
    )
    assert ends(tmp_path, {"model_type": "llama", "eos_token_id": 0}, **files) == (0,)
