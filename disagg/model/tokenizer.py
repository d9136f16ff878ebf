"""Text to token ids and back, also piece by piece while tokens still arrive.

Imports `tokenizers` alone, so that a router starts fast; a model without tokenizer.json is left to
transformers.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path

import tokenizers

from disagg.errors import ModelError, RequestError
from disagg.model.describe import locate_model

KNOWN = (
    1 << 16
)  # tokens that are spelled once: answers with log-probabilities name thousands
MOST_PENDING = 64  # tokens; what is no character by then never becomes one
BEFORE = 5  # tokens of a prompt that its answer is decoded behind
UNFINISHED = "\ufffd"  # what decoders put where bytes do not make a character (yet)
FALLBACK = re.compile("<0x([0-9A-F]{2})>")  # a byte, in vocabularies of characters


class Tokenizer:
    """The tokenizer of a model."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend

    @classmethod
    def load(cls, ref: str | Path | None = None) -> "Tokenizer":
        """The tokenizer of a model, found as `locate_model` does; ModelError if it has none."""
        folder = locate_model(None if ref is None else str(ref))
        file = folder / "tokenizer.json"
        if not file.is_file():
            return cls(_from_transformers(folder))
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # tokenizers raises bare Exception, nothing narrower
            raise ModelError(f"{file} is no tokenizer: {error}") from error

    @property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n has at least n / `longest_token` tokens."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @property
    def size(self) -> int:
        """Tokens of the vocabulary, without those that were added to it."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    @property
    def special_ids(self) -> set[int]:
        """Ids of the tokens that are no text."""
        added = self._backend.get_added_tokens_decoder()
        return {number for number, token in added.items() if token.special}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a prompt. Other threads go on meanwhile.

        special: with the special tokens that the model wants around it

        RequestError for text that is no UTF-8: lone surrogates, or bytes of another encoding.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not UTF-8 text: {error}") from error
        # of a batch: `encode` holds Python's lock, for seconds if the text is long; fast: without
        # offsets, since to free those of a million tokens holds it for half a second
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[
            0
        ].ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of token ids. special: with that of special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    @lru_cache(KNOWN)  # noqa: B019 - a service has one tokenizer
    def spell(self, token: int) -> str:
        """The text of one token behind another: some decoders strip a space in front of a text."""
        once, twice = (self.decode([token] * n, special=True) for n in (1, 2))
        return twice[len(once) :]

    @lru_cache(KNOWN)  # noqa: B019
    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character."""
        if UNFINISHED in (text := self.spell(token)):
            written, known = self._backend.id_to_token(token) or "", _bytes_by_letter()
            if fallback := FALLBACK.fullmatch(written):
                return bytes.fromhex(fallback[1])
            if known.keys() >= set(written):
                return bytes(known[letter] for letter in written)
        return text.encode()

    def detokenizer(self, before: Sequence[int] = ()) -> "Detokenizer":
        """A new incremental decoder for one stream of tokens, behind others that are not told."""
        return Detokenizer(self, before)


class Detokenizer:
    """Turns a stream of tokens into text, piece by piece, never half a character.

        emitted text │ context │ pending
        ─────────────┴─────────┴────────  tokens

    Each piece is decoded together with the tokens of the piece before it (the context), since
    decoders treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._tokens = [*before[-BEFORE:]]
        self._context, self._pending = 0, len(self._tokens)

    def add(self, ids: Iterable[int]) -> str:
        """The text that is now certain; empty while a character is incomplete."""
        self._tokens.extend(ids)
        text = self._unread()
        is_full = len(self._tokens) - self._pending >= MOST_PENDING
        if (
            is_full and not text
        ):  # special tokens: what follows is decoded as if they were not
            del self._tokens[self._pending : -1]
        if not text or (text.endswith(UNFINISHED) and not is_full):
            return ""
        self._context, self._pending = self._pending, len(self._tokens)
        return text

    def finish(self) -> str:
        """The rest: bytes that never became a character are shown as U+FFFD."""
        text = self._unread()
        self._pending = len(self._tokens)
        return text

    def _unread(self) -> str:
        known = self._tokenizer.decode(self._tokens[self._context : self._pending])
        return self._tokenizer.decode(self._tokens[self._context :])[len(known) :]


@cache
def _bytes_by_letter() -> dict[str, int]:
    """How byte-level vocabularies write bytes: as the letter of that number, or as one above."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = [ord(letter) for letter in letters if ord(letter) < 256]
    return dict(zip(letters, own + sorted({*range(256)} - {*own}), strict=True))


def _from_transformers(folder: Path) -> tokenizers.Tokenizer:
    # slow, seconds: models of before tokenizer.json
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer.backend_tokenizer
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{folder} has no tokenizer that can be read: {error}"
        ) from error
