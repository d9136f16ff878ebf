"""Text to token ids and back, also piece by piece while tokens still arrive.

Imports `tokenizers` alone, so that a router starts fast; a model without tokenizer.json is left to
transformers.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path

import tokenizers

from disagg.errors import ModelError, RequestError
from disagg.model.describe import locate_model

ANY_TEXT = "a"
SPELLING_CACHE = 1 << 16  # tokens: answers with log-probabilities name thousands
MOST_PENDING = 64  # tokens; bytes that are no character by then never become one
CONTEXT = 5  # tokens of a prompt that its answer is decoded with
UNFINISHED = "\ufffd"  # the decoders' sign for bytes that are no character (yet)
SPACE_SIGN = "▁"
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # a byte, in vocabularies of characters


class Tokenizer:
    """The tokenizer of a model."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend

    @classmethod
    def load(cls, ref: str | Path | None = None) -> "Tokenizer":
        """The tokenizer of a model that `locate_model` finds; ModelError if it has none."""
        folder = locate_model(None if ref is None else str(ref))
        file = folder / "tokenizer.json"
        backend = _from_file(file) if file.is_file() else _from_transformers(folder)
        # settings left from training; a prompt is neither cut nor padded
        backend.no_truncation()
        backend.no_padding()
        return cls(backend)

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: n characters have at least n / this many tokens."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @property
    def size(self) -> int:
        """Tokens of the vocabulary, without added ones."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    @property
    def special_ids(self) -> set[int]:
        """Ids of the special tokens, which are not text."""
        return {*self.special_tokens.values()}

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, by how they are written."""
        added = self._backend.get_added_tokens_decoder()
        return {
            token.content: number for number, token in added.items() if token.special
        }

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a prompt. Other threads go on meanwhile.

        special: with the special tokens that the model expects in front of it, unless it begins
                 with them. An end-of-text token that the tokenizer would append is left out: the
                 answer would be empty

        RequestError for text that is no UTF-8: lone surrogates, or bytes of another encoding.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not UTF-8 text: {error}") from error
        ids = self._encode(text, special=False)
        opening = self._opening
        if not special or tuple(ids[: len(opening)]) == opening:
            return ids
        return [*opening, *ids]

    @cached_property
    def _opening(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer adds in front of a text, such as a BOS."""
        plain = self._encode(ANY_TEXT, special=False)
        ids = self._encode(ANY_TEXT, special=True)
        place = ids.index(plain[0]) if plain else 0
        return tuple(ids[:place])

    def _encode(self, text: str, special: bool) -> list[int]:
        # a batch, since `encode` holds Python's lock, for seconds if the text is long; and without
        # offsets, since freeing those of a million tokens holds it for half a second
        (encoding,) = self._backend.encode_batch_fast(
            [text], add_special_tokens=special
        )
        return encoding.ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of token ids. special: with the text of special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    @lru_cache(SPELLING_CACHE)  # noqa: B019 - a service has one tokenizer
    def spell(self, token: int) -> str:
        """The text of one token behind another: some decoders strip a space in front of a text."""
        once = self.decode([token], special=True)
        twice = self.decode([token, token], special=True)
        return twice[len(once) :]

    @lru_cache(SPELLING_CACHE)  # noqa: B019
    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character."""
        text = self.spell(token)
        if UNFINISHED not in text:
            return text.encode()
        written = self._backend.id_to_token(token) or ""
        return _byte_token(written) or _bytes_of_letters(written) or text.encode()

    def token_bytes(self, size: int) -> list[bytes]:
        """The bytes of the tokens 0 to `size` - 1; empty for ids without a token."""
        written = ["" for _ in range(size)]
        for text, number in self._backend.get_vocab().items():
            if number < size:
                written[number] = text
        tokens = self._bytes_of_all(written)
        for number, token in self._backend.get_added_tokens_decoder().items():
            if number < size:
                tokens[number] = token.content.encode()
        return tokens

    def _bytes_of_all(self, written: Sequence[str]) -> list[bytes]:
        """The bytes of tokens as the vocabulary writes them, by id."""
        decoder = self._backend.decoder
        form = "" if decoder is None else decoder.__getstate__().decode()
        if '"ByteLevel"' in form:
            return [_bytes_of_letters(text) or text.encode() for text in written]
        if '"ByteFallback"' in form:
            return [_bytes_of_piece(text) for text in written]
        # slow, seconds
        return [self.bytes_of(i) if text else b"" for i, text in enumerate(written)]

    def detokenizer(self, before: Sequence[int] = ()) -> "Detokenizer":
        """A new incremental decoder for one stream of tokens.

        before: tokens in front of the stream; their text is not returned
        """
        return Detokenizer(self, before)


class Detokenizer:
    """Turns a stream of tokens into text, piece by piece, without half characters.

        emitted text │ context │ pending
        ─────────────┴─────────┴────────  tokens

    Each piece is decoded together with the tokens of the piece before it (the context), since
    decoders treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._tokens = [*before[-CONTEXT:]]
        self._context = 0
        self._pending = len(self._tokens)

    def add(self, ids: Iterable[int]) -> str:
        """The text that is now certain; empty while a character is incomplete."""
        self._tokens.extend(ids)
        text = self._unread()
        is_full = len(self._tokens) - self._pending >= MOST_PENDING
        if is_full and not text:
            # only special tokens: later tokens are decoded without them
            del self._tokens[self._pending : -1]
        if not text or (text.endswith(UNFINISHED) and not is_full):
            return ""
        self._context = self._pending
        self._pending = len(self._tokens)
        return text

    def cut(self) -> str:
        """The rest of the text before something that is no text; more tokens follow behind it."""
        text = self.finish()
        if text.endswith(UNFINISHED):
            # later bytes would complete the character
            self._context = self._pending
        return text

    def finish(self) -> str:
        """The rest of the text: bytes that never became a character are shown as U+FFFD."""
        text = self._unread()
        self._pending = len(self._tokens)
        return text

    def _unread(self) -> str:
        context = self._tokenizer.decode(self._tokens[self._context : self._pending])
        text = self._tokenizer.decode(self._tokens[self._context :])
        return text[len(context) :]


@cache
def _bytes_by_letter() -> dict[str, int]:
    """The byte of each letter of a byte-level vocabulary.

    A byte is the letter with its number, or, if that cannot be printed, a letter above 255.
    """
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    printed = [ord(letter) for letter in letters if ord(letter) < 256]
    others = sorted(set(range(256)) - set(printed))
    return dict(zip(letters, printed + others, strict=True))


def _bytes_of_letters(written: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; empty if it is none."""
    byte_of = _bytes_by_letter()
    if not all(letter in byte_of for letter in written):
        return b""
    return bytes(byte_of[letter] for letter in written)


def _bytes_of_piece(written: str) -> bytes:
    """The bytes of a token of a vocabulary of characters, which has a sign for the space."""
    return _byte_token(written) or written.replace(SPACE_SIGN, " ").encode()


def _byte_token(written: str) -> bytes:
    """The byte of a token that is one, such as "<0x0A>"; empty if it is none."""
    byte_token = BYTE_TOKEN.fullmatch(written)
    return bytes.fromhex(byte_token[1]) if byte_token else b""


def _from_file(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception, nothing narrower
        raise ModelError(f"{file} is not a tokenizer file: {error}") from error


def _from_transformers(folder: Path) -> tokenizers.Tokenizer:
    # slow, seconds: models older than tokenizer.json
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        return tokenizer.backend_tokenizer
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{folder} has no tokenizer that can be read: {error}"
        ) from error
