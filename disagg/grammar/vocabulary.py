"""The tokens of a model as bytes, which grammars are followed in."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

END_NAME = b"<|end of the grammar|>"


class Vocabulary:
    """The tokens of a model.

    end: an id behind all others, for the end of a text of the grammar. What ends an answer is the
         engine's business
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Mapping[str, int],
        encode: Callable[[str], Sequence[int]],
    ):
        """
        tokens:  the bytes of each, by id
        special: ids by how they are written; these tokens are no text
        encode:  the tokens of a text. Where a grammar forces a text, the model gets these
        """
        self.end = len(tokens)
        self.words = (len(tokens) + 32) // 32  # of a mask, with the end
        self._tokens = tokens
        self._special = special
        self._encode = encode

    @cached_property
    def compiled(self) -> LLTokenizer:
        """For llguidance: a tree of 50 MB for 150,000 tokens, which takes a second."""
        return LLTokenizer(TokenizerWrapper(self), n_vocab=self.end + 1)

    # -- what TokenizerWrapper reads

    @property
    def eos_token_id(self) -> int:
        return self.end

    @property
    def bos_token_id(self) -> None:
        return None

    @property
    def tokens(self) -> list[bytes]:
        return [*self._tokens, END_NAME]

    @property
    def special_token_ids(self) -> list[int]:
        return [*self._special.values(), self.end]

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that a grammar forces, without any that the tokenizer adds."""
        if not isinstance(text, str):
            raise TypeError("TokenizerWrapper asks whether texts may be bytes")
        tokens = list(self._encode(text))
        size = len(self._tokens)
        written = b"".join(self._tokens[token] for token in tokens if token < size)
        return tokens if written == text.encode() else self._cut(text.encode())

    def _cut(self, text: bytes) -> list[int]:
        """The longest tokens, for tokenizers that add a space in front of a text."""
        tokens: list[int] = []
        while text:
            for size in range(min(len(text), self._longest), 0, -1):
                token = self._ids.get(text[:size])
                if token is not None:
                    break
            else:
                return tokens  # the rest is not forced
            tokens.append(token)
            text = text[size:]
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Ids by bytes; of equal tokens the first."""
        special = {*self._special.values()}
        pairs = [(word, i) for i, word in enumerate(self._tokens) if i not in special]
        return dict(reversed(pairs))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)
