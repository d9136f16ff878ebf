"""The events of one request that its router may lack, in little memory.

Plain tokens lie in arrays, 4 bytes each, with their log-probabilities beside them; 64 answers of
32,768 tokens as objects would take half a gigabyte. All other events stay objects.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from disagg.transfer.messages import TokenEvent

NONE = -1  # in place of a number of likeliest tokens: no log-probabilities


class TokenRun:
    """Consecutive tokens of an answer, each with equally many log-probabilities.

    first:         index of the first token in the answer
    num_likeliest: log-probabilities of each token beside its own; NONE: not even that
    """

    def __init__(self, first: int, num_likeliest: int):
        self.first = first
        self.num_likeliest = num_likeliest
        self._tokens = array("i")
        self._own = array("d")
        self._likeliest_tokens = array("i")
        self._likeliest = array("d")

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.first + len(self._tokens)

    def append(self, token: int, logprobs: Sequence[Any]) -> None:
        """Add the next token."""
        self._tokens.append(token)
        for own, likeliest in logprobs:
            self._own.append(own)
            for likely_token, logprob in likeliest:
                self._likeliest_tokens.append(likely_token)
                self._likeliest.append(logprob)

    def drop_below(self, index: int) -> None:
        """Drop the tokens before an index."""
        count = max(0, index - self.first)
        del self._tokens[:count]
        del self._own[:count]
        per_token = max(0, self.num_likeliest)
        del self._likeliest_tokens[: count * per_token]
        del self._likeliest[: count * per_token]
        self.first += count

    def events(self, rid: str, attempt: int, start: int) -> Iterator[TokenEvent]:
        """The events of the tokens from an index on."""
        for position in range(max(0, start - self.first), len(self._tokens)):
            yield TokenEvent(
                rid,
                attempt,
                self.first + position,
                self._tokens[position],
                logprobs=self._logprobs(position),
            )

    def _logprobs(self, position: int) -> tuple[Any, ...]:
        if self.num_likeliest == NONE:
            return ()
        start = position * self.num_likeliest
        part = slice(start, start + self.num_likeliest)
        pairs = zip(self._likeliest_tokens[part], self._likeliest[part], strict=True)
        return ((self._own[position], tuple(pairs)),)


class EventRecord:
    """The events of one attempt, in their order.

    last:    the last event, also when the router has it
    attempt: that all events are of
    """

    def __init__(self, first: TokenEvent):
        self.last = first
        self.attempt = first.attempt
        self._entries: list[TokenRun | TokenEvent] = []
        self._run: TokenRun | None = None  # the last entry, if it is one
        self.append(first)

    def __len__(self) -> int:
        """How many events are kept."""
        return sum(
            entry.end - entry.first if isinstance(entry, TokenRun) else 1
            for entry in self._entries
        )

    def append(self, event: TokenEvent) -> None:
        """Keep one more event."""
        self.last = event
        token, logprobs = event.token, event.logprobs
        has_more = event.finish_reason or event.error or event.stats is not None
        if token is None or has_more or len(logprobs) > 1:  # more: of the prompt
            self._run = None
            self._entries.append(event)
            return
        num_likeliest = len(logprobs[0][1]) if logprobs else NONE
        run = self._run
        if run is None or (run.end, run.num_likeliest) != (event.index, num_likeliest):
            run = self._run = TokenRun(event.index, num_likeliest)
            self._entries.append(run)
        run.append(token, logprobs)

    def drop_below(self, num_tokens: int) -> None:
        """Drop what a router that has `num_tokens` tokens does not lack."""
        for entry in self._entries:
            if isinstance(entry, TokenRun):
                entry.drop_below(min(num_tokens, entry.end))
        self._entries = [x for x in self._entries if _is_lacked(x, num_tokens)]
        last_entry = self._entries[-1] if self._entries else None
        self._run = last_entry if isinstance(last_entry, TokenRun) else None

    def lacked(self, num_tokens: int) -> Iterator[TokenEvent]:
        """The events that a router with `num_tokens` tokens may lack."""
        for entry in self._entries:
            if isinstance(entry, TokenRun):
                yield from entry.events(self.last.rid, self.attempt, num_tokens)
            elif _is_lacked(entry, num_tokens):
                yield entry


def _is_lacked(entry: TokenRun | TokenEvent, num_tokens: int) -> bool:
    """Whether a router that has `num_tokens` tokens may lack any of it."""
    if isinstance(entry, TokenRun):
        return entry.end > max(num_tokens, entry.first)
    is_new = entry.index >= num_tokens
    return is_new or entry.token is None or bool(entry.finish_reason)
