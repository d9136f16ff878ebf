"""A model whose logits are a function of all tokens that were fed, to the last bit.

Real logits depend in their last bits on the batch, so with a lossy codec two right engines may say
different tokens. These do not. The real model computes beside, on the same tokens, so its logits
can be compared within the tolerance of a codec.
"""

import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from disagg.engine import engine as engine_module
from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.sequence import Request, SamplingParams
from disagg.engine.sequence import Sequence as EngineSequence
from disagg.model.attention import Batch
from disagg.model.runner import Runner
from tests.engine.serving import StandIn
from tests.model.tiny import VOCAB

PERIOD = 40  # tokens of the passage that answers keep coming back to
TABLE = 2.0 * torch.randn(997, VOCAB, generator=torch.Generator().manual_seed(1))
# by request, of the tokens behind each position
Logits = dict[str, dict[int, Tensor]]


class ScriptedRunner(StandIn):
    """Says mostly what follows the last token in a passage, and sometimes anything.

    logits: of the real model, by request and position
    """

    def __init__(self, runner: Runner, entries: "StepEntries"):
        super().__init__(runner)
        self.logits: Logits = {}
        self._entries = entries
        self._texts: WeakKeyDictionary[EngineSequence, FedText] = WeakKeyDictionary()

    def forward(self, batch: Batch) -> Tensor:
        real = iter(self._runner.forward(batch))
        rows = []
        for entry in self._entries.of_this_step():
            text = self._texts.setdefault(entry.sequence, FedText())
            text.feed(entry)
            last = entry.sequence.n + entry.count
            of_request = self.logits.setdefault(entry.sequence.rid, {})
            for position in range(last - entry.outputs, last):
                of_request[position] = next(real).clone()
                rows.append(text.logits_behind(position))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)


class StepEntries:
    """What the step of this thread computes: engines of several workers share a process."""

    def __init__(self, monkeypatch: Any):
        self._local = threading.local()
        build = engine_module.build_batch

        def build_batch(scheduled: Sequence[ScheduledTokens], *arguments: Any) -> Batch:
            self._local.entries = list(scheduled)
            return build(scheduled, *arguments)

        monkeypatch.setattr(engine_module, "build_batch", build_batch)

    def of_this_step(self) -> list[ScheduledTokens]:
        return self._local.entries


class FedText:
    """The tokens of one sequence that its records hold, each with a digest of all up to it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._digests: list[int] = []

    def feed(self, entry: ScheduledTokens) -> None:
        sequence = entry.sequence
        n = sequence.n
        if n > len(self._tokens):  # these records were computed elsewhere, or cached
            known = [*sequence.request.tokens, *sequence.emitted]
            self._append(known[len(self._tokens) : n])
        del self._tokens[n:], self._digests[n:]
        self._append(entry.tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            before = self._digests[-1] if self._digests else 0
            self._tokens.append(token)
            self._digests.append((before * 1_000_003 + token + 1) % (2**61 - 1))

    def logits_behind(self, position: int) -> Tensor:
        digest = self._digests[position]
        logits = TABLE[digest % len(TABLE)].clone()
        if digest % 10 < 9:
            logits[(self._tokens[position] + 1) % PERIOD] += 9.0
        return logits


class RandomRequests:
    """Requests with random parameters of all kinds; the same for one seed.

    most_tokens: of an answer
    """

    def __init__(self, seed: int, codecs: Sequence[str], most_tokens: int = 70):
        self._random = random.Random(seed)
        self._codecs = codecs
        self._most_tokens = most_tokens

    def next(self, rid: str, longest: int = 150) -> Request:
        draw = self._random
        start = draw.randrange(PERIOD)
        num_tokens = draw.choice((1, 2, 5, 63, 64, 65, draw.randint(1, longest)))
        prompt = [(start + i) % PERIOD for i in range(num_tokens)]
        for _ in range(num_tokens // 20):
            prompt[draw.randrange(num_tokens)] = draw.randrange(VOCAB - 4)
        params = SamplingParams(**self._params())
        return Request(rid, tuple(prompt), params, draw.choice(self._codecs))

    def prediction(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Often of the right answer, with a few changes."""
        draw = self._random
        text = [*answer]
        match draw.randrange(4):
            case 0:
                return ()
            case 1:
                return tuple(draw.randrange(VOCAB - 4) for _ in text)
            case 2:
                text[draw.randrange(len(text))] ^= 1
            case 3:
                cut = draw.randrange(len(text))
                del text[cut : cut + draw.randint(1, 4)]
        return tuple(token % VOCAB for token in text)

    def _params(self) -> dict[str, Any]:
        draw = self._random
        max_tokens = draw.randint(1, self._most_tokens)
        params: dict[str, Any] = {"max_tokens": max_tokens, "seed": draw.randrange(99)}
        choices: Mapping[str, Any] = {
            "temperature": draw.choice((0.3, 1.0, 1.5)),
            "top_p": draw.choice((0.5, 0.95)),
            "top_k": draw.choice((1, 5, 50)),
            "min_p": 0.05,
            "presence_penalty": 0.7,
            "frequency_penalty": draw.choice((-0.5, 0.4)),
            "repetition_penalty": draw.choice((0.9, 1.2)),
            "logit_bias": ((draw.randrange(PERIOD), draw.choice((5.0, -100.0))),),
            "stop_token_ids": (draw.randrange(VOCAB - 4), draw.randrange(PERIOD)),
            "min_tokens": draw.randint(0, max_tokens),
            "logprobs": draw.randint(0, 3),
        }
        params |= {name: x for name, x in choices.items() if draw.random() < 0.3}
        if "logprobs" in params and draw.random() < 0.3:
            params["prompt_logprobs"] = True
        return params
