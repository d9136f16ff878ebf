"""The tokens that end an answer. Authors name them in up to three places.

generation_config.json, config.json   eos_token_id: an id, or a list of ids
the tokenizer                         eos_token: a text, whose id is in its vocabulary

gpt-oss has two more, since it ends a message to its user and a tool call in two ways.

Fine-tuned models often change only one of these, so all of them count. One exception: some tools
write an architecture's default ids into config.json, and these may be ordinary words of this
tokenizer. So a token that only config.json names counts only if it was added to the vocabulary.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from disagg.errors import ModelError
from disagg.model.json_file import read_object

GENERATION_CONFIG = "generation_config.json"
KEY = "eos_token_id"
CHANNEL_MODEL = "gpt_oss"  # the model type
CHANNEL_ENDS = ("<|return|>", "<|call|>")


def end_tokens(
    folder: Path, config: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """The ids of a model folder's end tokens, each once. Ids outside the vocabulary are ignored.

    ModelError for an `eos_token_id` that is neither an id nor a list of ids.
    """
    file = folder / GENERATION_CONFIG
    vocabulary = TokenizerVocabulary(folder)
    ids = _ids(file, read_object(file)) + vocabulary.end_ids
    if config.get("model_type") == CHANNEL_MODEL:
        ids += vocabulary.ids_of(CHANNEL_ENDS)
    for part in (config, config.get("text_config") or {}):
        named = _ids(folder / "config.json", part)
        ids += [
            token for token in named if token in ids or vocabulary.may_be_special(token)
        ]
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocab_size))


def _ids(file: Path, content: Mapping[str, Any]) -> list[int]:
    value = content.get(KEY)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise ModelError(
            f"{file}: {KEY} is {value!r}; expected a token id or a list of token ids"
        )
    return ids


class TokenizerVocabulary:
    """Token ids by text, from the files of a tokenizer. Large files are read only when needed."""

    def __init__(self, folder: Path):
        self._folder = folder

    @property
    def end_ids(self) -> list[int]:
        """The id of the tokenizer's `eos_token`; empty without one, and for an unknown one."""
        special_tokens_map = read_object(self._folder / "special_tokens_map.json")
        text = _text(self._config.get("eos_token"))
        text = text or _text(special_tokens_map.get("eos_token"))
        if text is None:
            return []
        token = self._added.get(text)
        if token is None:
            token = self._words.get(text)
        return [] if token is None else [token]

    def ids_of(self, texts: Iterable[str]) -> list[int]:
        """The ids of those of some added tokens that it has."""
        return [self._added[text] for text in texts if text in self._added]

    def may_be_special(self, token: int) -> bool:
        """Whether a token was added to the vocabulary; true if no added tokens are known."""
        return not self._added or token in self._added.values()

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_object(self._folder / "tokenizer_config.json")

    @cached_property
    def _content(self) -> dict[str, Any]:
        return read_object(self._folder / "tokenizer.json")

    @cached_property
    def _added(self) -> Mapping[str, int]:
        """Added tokens, including special ones; from the small file if it has them."""
        by_id = self._config.get("added_tokens_decoder")
        try:
            if by_id:
                return {x["content"]: int(token) for token, x in by_id.items()}
            added = self._content.get("added_tokens") or []
            return {each["content"]: each["id"] for each in added}
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._nonsense(error) from error

    @cached_property
    def _words(self) -> Mapping[str, int]:
        """The vocabulary without added tokens; some models have a list of words with scores."""
        try:
            words = (self._content.get("model") or {}).get("vocab") or {}
            if isinstance(words, list):
                words = {word: token for token, (word, _) in enumerate(words)}
            return dict(words)
        except (AttributeError, TypeError, ValueError) as error:
            raise self._nonsense(error) from error

    def _nonsense(self, error: Exception) -> ModelError:
        return ModelError(
            f"the added tokens or words of the tokenizer in {self._folder} make no sense: {error}"
        )


def _text(token: Any) -> str | None:
    """The text of a special token, which may be an object; None: there is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
