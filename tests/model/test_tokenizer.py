from functools import cache
from unittest.mock import Mock

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from disagg.errors import ModelError
from disagg.model.tokenizer import MOST_PENDING, Tokenizer
from tests.model.tiny import byte_tokenizer

packaged = cache(Tokenizer.load)
TEXT = "Grüße aus 東京 🎉, naïve “quotes”."


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def test_decode_gives_back_what_was_encoded(tokenizer):
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_encoding_lets_other_threads_go_on():
    """Other functions of the library hold Python's lock, for seconds if the text is long."""
    backend = Mock(spec=["encode_batch_fast"])
    backend.encode_batch_fast.return_value = [Mock(ids=[1, 2])]

    ids = Tokenizer(backend).encode("text")

    assert ids == [1, 2]


@given(st.text())
def test_no_text_has_fewer_tokens_than_the_longest_token_allows(text):
    tokenizer = packaged()

    ids = tokenizer.encode(text)

    assert len(text) <= tokenizer.longest_token * len(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_never_split_a_character_and_add_up(tokenizer, size):
    ids = tokenizer.encode(TEXT)
    stream = tokenizer.detokenizer()

    pieces = [stream.add(ids[i : i + size]) for i in range(0, len(ids), size)]

    text = "".join(pieces)
    filled = [piece for piece in pieces if piece]
    assert "\ufffd" not in text
    assert text + stream.finish() == TEXT
    assert len(filled) > len(TEXT) / (2 * size)


def test_bytes_that_never_form_a_character_come_at_the_end(tokenizer):
    *incomplete, _ = tokenizer.encode("ab🎉")
    stream = tokenizer.detokenizer()

    piece = stream.add(incomplete)
    rest = stream.finish()

    assert piece == ""
    assert rest.startswith("ab\ufffd")
    assert stream.finish() == ""


def surrounded(template: str) -> Tokenizer:
    """A tokenizer that adds these special tokens around a text, such as "[BOS] $A"."""
    backend = byte_tokenizer()
    names = ["[BOS]", "[EOS]", "[SOP]"]
    backend.add_special_tokens(names)
    numbers = [(name, backend.token_to_id(name)) for name in names]
    backend.post_processor = processors.TemplateProcessing(template, None, numbers)
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("$A", "a man", "a man"),
        ("[BOS] $A", "a man", "[BOS]a man"),
        ("[BOS] $A", "[BOS]a man", "[BOS]a man"),
        ("[BOS] $A", "a [BOS]man", "[BOS]a [BOS]man"),
        ("[BOS] $A [EOS]", "a man", "[BOS]a man"),
        ("$A [EOS]", "a man", "a man"),
        ("$A [EOS]", "a man[EOS]", "a man[EOS]"),
        ("[BOS] [SOP] $A", "a man", "[BOS][SOP]a man"),
        ("[BOS] [SOP] $A", "[BOS]a man", "[BOS][SOP][BOS]a man"),
    ],
)
def test_a_prompt_begins_once_and_does_not_end(template, text, expected):
    tokenizer = surrounded(template)

    tokens = tokenizer.encode(text)

    assert tokens == tokenizer.encode(expected, special=False)


def test_limits_of_a_training_cut_no_prompt_and_fill_none(tmp_path):
    backend = byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))

    tokens = Tokenizer.load(tmp_path).encode("a man who")

    assert tokens == Tokenizer(byte_tokenizer()).encode("a man who")


def byte_fallback() -> Tokenizer:
    """A vocabulary of letters, and of the bytes of all others."""
    named = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    backend = tokenizers.Tokenizer(models.BPE(named, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend)


@pytest.mark.parametrize("kind", [packaged, byte_fallback])
def test_bytes_of_tokens_equal_the_text_in_split_characters(kind):
    tokenizer = kind()
    text = "a\u6771a\U0001f389\ufffda"
    tokens = tokenizer.encode(text, special=False)

    pieces = [tokenizer.bytes_of(token) for token in tokens]

    assert b"".join(pieces).decode() == text
    assert b"\xf0" in pieces
    assert tokenizer.spell(tokens[-1]) == "a"


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    with pytest.raises(ModelError, match="tokenizer"):
        Tokenizer.load(tmp_path)

    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ModelError, match="is not a tokenizer file"):
        Tokenizer.load(tmp_path)


def test_an_answer_keeps_its_leading_space(tokenizer):
    strip = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer._backend.decoder = strip
    prompt = tokenizer.encode("a man")
    answer = tokenizer.encode(" who")

    stream = tokenizer.detokenizer(prompt)
    text = stream.add(answer) + stream.finish()

    assert text == " who"
    assert tokenizer.decode(answer) == "who"


def test_broken_characters_are_decoded_a_few_tokens_at_a_time(tokenizer, monkeypatch):
    broken = tokenizer.encode("🎉")[:1]
    decode = tokenizer.decode
    sizes = []

    def record(ids):
        sizes.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", record)
    stream = tokenizer.detokenizer()

    text = "".join(stream.add(broken) for _ in range(500)) + stream.finish()

    assert set(text) == {"\ufffd"}
    assert max(sizes) <= 2 * MOST_PENDING


def test_what_has_no_text_is_decoded_a_few_tokens_at_a_time(monkeypatch):
    """Ends of a text, of who ignores them."""
    tokenizer, sizes = Tokenizer.load(), []
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids: (sizes.append(len(ids)), decode(ids))[1]
    )
    stream, (end,) = tokenizer.detokenizer(), tokenizer.special_ids

    ids = [*tokenizer.encode("one"), *[end] * 500, *tokenizer.encode(" two ☃")]

    assert "".join(stream.add([token]) for token in ids) == "one two ☃"
    assert max(sizes) <= 2 * MOST_PENDING


@pytest.mark.parametrize("form", ["packaged", "bytes"])
def test_the_bytes_of_all_tokens_are_those_of_each(form, tokenizer):
    if form == "packaged":
        tokenizer = packaged()
    size = tokenizer.size + 2

    tokens = tokenizer.token_bytes(size)

    assert len(tokens) == size
    each = [tokenizer.bytes_of(number) for number in range(tokenizer.size)]
    assert tokens[: tokenizer.size] == each
