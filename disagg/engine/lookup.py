"""Look-up speculation: an answer often repeats a passage of its prompt, or of itself.

    text so far    ... the quick brown fox jumps ... the quick brown │
    draft                                                            │ fox jumps ...

The last tokens of a text are looked up in the text before them, and what followed there is a draft.
Where a request has a prediction of its answer, the draft is what comes next in that; where a
grammar forces the next tokens, they are the draft.
A step feeds the draft behind the last token, and samples at all of these tokens. A token of the
draft was right if it equals the one sampled before it; from the first wrong one on, all are taken
back. So an answer is the one that it would be without drafts.

Where few sequences decode, a step reads the same weights and pages for one token as for several.
Where many do, or where nothing repeats, drafts cost more than they bring. So large steps have none,
and a sequence whose drafts are wrong waits longer and longer before it has the next one.
"""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from disagg.config import EngineConfig
from disagg.engine.prediction import MATCH, FollowedPrediction
from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.sequence import AS_MANY_AS_FIT, Request, Sequence
from disagg.paged.page_tables import draftable

LOOK_BACK = 32768  # tokens among which the last MATCH ones are looked up
LEAST_DRAFT = 2
LONGEST_WAIT = 64  # tokens of an answer
CPU_DRAFT = 7  # tokens of a draft, unless the config says
CPU_ROWS = 16  # tokens of a step that take a CPU hardly longer than one
NUM_CHARACTERS = sys.maxunicode + 1  # more than any vocabulary has tokens

Forced = Callable[[Sequence, int], list[int]]


class TokenText:
    """Tokens that can be looked up in each other."""

    def __init__(self) -> None:
        # a character for each token: a string is searched in one call, by whole characters
        self._text = ""

    def add(self, tokens: Seq[int]) -> None:
        """Append tokens."""
        new_text = "".join(chr(token % NUM_CHARACTERS) for token in tokens)
        self._text = (self._text + new_text)[-LOOK_BACK:]

    def continuation(self, size: int) -> list[int]:
        """The `size` tokens that follow the last ones, if they do as they did before.

        Empty where the last tokens are not found again. A text that has begun to repeat itself
        goes on repeating.
        """
        text = self._text
        last_tokens = text[-MATCH:]
        place = text.rfind(last_tokens, 0, -1)
        if place < 0:
            return []
        start = place + len(last_tokens)
        following = [ord(token) for token in text[start : start + size]]
        repeats = -(-size // len(following))
        return (following * repeats)[:size]


@dataclass
class DraftHistory:
    """The text of one sequence, and how its drafts did.

    size:       tokens of the next draft
    prediction: of the answer, by its request; without tokens if there is none
    answered:   tokens of the answer in the text
    resume_at:  tokens of the answer from which on there are drafts again
    misses:     drafts in a row without a right token
    """

    text: TokenText
    size: int
    prediction: FollowedPrediction = field(
        default_factory=lambda: FollowedPrediction(())
    )
    answered: int = 0
    resume_at: int = 0
    misses: int = 0

    @classmethod
    def of(cls, request: Request) -> "DraftHistory":
        """Before its answer. Drafts may come from anywhere in its prediction, and in its prompt."""
        text = TokenText()
        text.add(request.prediction)
        text.add(request.tokens)
        prediction = FollowedPrediction(request.prediction)
        return cls(text, LEAST_DRAFT * 2, prediction)

    def draft(self, emitted: Seq[int], size: int) -> list[int]:
        """At most `size` tokens that may come next, after an answer so far.

        A prediction never waits: it has no next tokens until the answer has come back to it.
        """
        tokens = emitted[self.answered :]
        self.text.add(tokens)
        self.prediction.follow(tokens)
        self.answered = len(emitted)
        size = min(size, self.size)
        predicted = self.prediction.continuation(size)
        if predicted or self.answered < self.resume_at:
            return predicted
        return self.text.continuation(size)

    def learn(self, drafted: int, right: int, most: int) -> None:
        """Draft more after drafts that were right, and less or later after wrong ones."""
        if right == drafted:
            self.size = min(most, 2 * self.size)
        else:
            self.size = max(LEAST_DRAFT, right + 1)
        self.misses = 0 if right else self.misses + 1
        if self.misses > 1:
            self.resume_at = self.answered + min(LONGEST_WAIT, 2**self.misses)


class LookUp:
    """Adds drafts to the tokens of a step.

    most:      tokens of a draft; 0: there are none
    most_rows: tokens of a step with drafts
    context:   of the model
    forced:    the tokens of a sequence that come next in any case, at most so many
    """

    def __init__(self, most: int, most_rows: int, context: int, forced: Forced):
        self.most = most
        self._forced = forced
        self._most_rows = most_rows
        self._context = context
        self._histories: WeakKeyDictionary[Sequence, DraftHistory] = WeakKeyDictionary()

    def without_drafts(self) -> "LookUp":
        """For the same steps, none of which has a draft."""
        return LookUp(0, self._most_rows, self._context, self._forced)

    def fixed(self) -> "FixedDrafts":
        """Short drafts for the same steps."""
        return FixedDrafts(self.most, self._most_rows, self._context, self._forced)

    @classmethod
    def on(
        cls, device: str, config: EngineConfig, context: int, forced: Forced
    ) -> "LookUp":
        """Look-up as a config says, for a model on a device."""
        most = config.speculative_tokens
        if most is None:
            most = CPU_DRAFT if device == "cpu" else 0
        rows = CPU_ROWS if device == "cpu" else config.max_batch_tokens
        return cls(most, min(rows, config.max_batch_tokens), context, forced)

    def add_drafts(self, scheduled: Seq[ScheduledTokens]) -> list[ScheduledTokens]:
        """The decoding sequences of a step, those that allow it with a draft."""
        spare = self._most_rows - sum(entry.count for entry in scheduled)
        if not self.most or spare < LEAST_DRAFT:
            return list(scheduled)
        drafted = []
        for entry in scheduled:
            draft = self._draft(entry, spare)
            spare -= len(draft)
            if draft:
                count = entry.count + len(draft)
                entry = replace(entry, count=count, draft=tuple(draft))
            drafted.append(entry)
        return drafted

    def _draft(self, entry: ScheduledTokens, spare: int) -> list[int]:
        sequence = entry.sequence
        room = min(spare, most_tokens(entry, self._context))
        if room < LEAST_DRAFT:
            return []
        history = self._histories.get(sequence)
        if history is None:
            history = DraftHistory.of(sequence.request)
            self._histories[sequence] = history
        forced = self._forced(sequence, min(room, self.most))
        if len(forced) >= LEAST_DRAFT:
            return forced
        return history.draft(sequence.emitted, room)

    def learn(self, entry: ScheduledTokens, right: int) -> None:
        """How many tokens of a draft were right."""
        history = self._histories[entry.sequence]
        history.learn(len(entry.draft), right, self.most)


class FixedDrafts(LookUp):
    """The same short draft for every sequence that can have one, right or wrong: for a warm-up."""

    def _draft(self, entry: ScheduledTokens, spare: int) -> list[int]:
        room = min(spare, most_tokens(entry, self._context))
        return [0] * LEAST_DRAFT if room >= LEAST_DRAFT else []

    def learn(self, entry: ScheduledTokens, right: int) -> None:
        """Change nothing."""


def most_tokens(entry: ScheduledTokens, context: int) -> int:
    """The longest draft that a sequence can use and take back.

    States cannot be taken back, and a sequence that moves stops at a certain token. All tokens of
    a draft are rotated alike.
    """
    sequence = entry.sequence
    is_single = entry.count == 1 and entry.completes
    if not is_single or sequence.hold_at is not None or sequence.plan.state_bytes:
        return 0
    limits = [draftable(group, sequence.n) for group in sequence.plan.paged]
    limits.append(context - sequence.length)
    switch = sequence.plan.rope_switch
    if switch is not None and sequence.length <= switch:
        limits.append(switch - sequence.length)
    max_tokens = sequence.request.params.max_tokens
    if max_tokens != AS_MANY_AS_FIT:
        limits.append(max_tokens - len(sequence.emitted) - 1)
    return min(limits)
