"""Teacher-forced quality: the same rows under every codec, each paired with exact KV.

    row      │ prompt: exact attention, then compressed │ scored: fed to the pages in blocks │
    exact    │ the same, kept as the model computed it  │ the same                           │

Every scored token but the last predicts the next one. Reads no file and draws nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from disagg.codecs.describe import FP16_BYTES, bits_per_element
from disagg.codecs.planning import makes_plan, parse_plan
from disagg.errors import ConfigError, ModelError
from disagg.eval.paged import EXACT, PagedKV, PromptKV, prefill
from disagg.eval.recall import Recall, greedy, same_tokens
from disagg.eval.texts import PYTHON, cut_rows, read_text
from disagg.kv.plan import Plan
from disagg.model.capacity import kv_shape
from disagg.model.describe import describe_model
from disagg.model.outliers import KeyOutliers
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer

Row = dict[str, Any]  # a JSON object

# every codec with its defaults, and the specs that papers compare
CODECS = (
    "raw:dtype=fp16",
    "int8",
    "fp8",
    "banded:bits=3",
    "banded:bits=2",
    "kivi:bits=4",
    "kivi:sink=64",
    "kivi",
    "kivi:group=32",
    "gear-l:bits=2,backbone=kivi",
    "gear:bits=2,backbone=kivi",
    "ott",
    "kcvt",
    "gear-l",
    "gear",
    "pertoken",
    "decoquant",
    "h2o",
    "alignedkv",
)
EXACT_DTYPE = "float32"  # of the model: its own rounding would hide that of the codecs
FILLER_CHARS = 200_000  # characters of the first text between pass keys
ANSWER_TOKENS = 1024  # resident bytes are also reported after an answer of this length


@dataclass(frozen=True)
class EvalOptions:
    """The codecs to judge, and the texts and tasks to judge them on.

    codecs:  empty: those of CODECS that fit the model's head dim
    texts:   files, or "python"
    rows:    rows of each text
    prompt:  tokens to compress
    score:   tokens fed after the prompt
    free:    greedy tokens to compare with exact KV, after the prompt and one more token
    passkeys, keys: lengths of prompts with a pass key in them, and keys of each length
    factors: of outlier channels in the keys, see `model/outliers.py`; 1: unchanged
    streaming: tails are sealed while tokens are fed, as in the service; else fed tokens stay exact
    threads: of torch; on a busy machine several threads wait for each other
    """

    model: str | None = None
    codecs: tuple[str, ...] = ()
    texts: tuple[str, ...] = (PYTHON,)
    rows: int = 4
    prompt: int = 1152
    score: int = 384
    free: int = 0
    passkeys: tuple[int, ...] = ()
    keys: int = 5
    factors: tuple[int, ...] = (1,)
    streaming: bool = False
    threads: int = 1


@dataclass(frozen=True)
class Case:
    """One codec on one row, of a model with outliers of a factor."""

    text: str
    row: int
    codec: str
    factor: int = 1

    def __str__(self) -> str:
        outliers = f", outliers x {self.factor}" if self.factor != 1 else ""
        return f"{self.text}, row {self.row + 1}, {self.codec}{outliers}"


@dataclass(frozen=True)
class _Truth:
    """The results of exact KV on one row.

    prompt:  K, V and states
    outputs: of attention, per layer [W, Hq, D]
    logp:    [score - 1, V]
    greedy:  greedy tokens
    """

    prompt: PromptKV
    outputs: Sequence[Tensor]
    logp: Tensor
    greedy: Sequence[int]


class Judge:
    """A loaded model and rows of tokens; measures case by case, in the order of `cases`."""

    def __init__(self, options: EvalOptions):
        torch.set_num_threads(options.threads)
        self.options = options
        info = describe_model(options.model, EXACT_DTYPE)
        shape = kv_shape(info)
        if options.factors != EvalOptions.factors and shape.layers[0].latent:
            raise ModelError(
                f"{info.architecture} keeps latents; --stress outliers needs keys of heads"
            )
        self.codecs = options.codecs or tuple(
            codec for codec in CODECS if makes_plan(codec, shape)
        )
        self.specs = {codec: parse_plan(codec, shape).spec for codec in self.codecs}
        _check_lengths(options, info.context_length)
        tokenizer = Tokenizer.load(options.model)
        texts = dict(map(read_text, options.texts))
        length = options.prompt + options.score
        self.rows = {
            name: cut_rows(text, tokenizer, length, options.rows)
            for name, text in texts.items()
        }
        self.runner = Runner.load(options.model, EXACT_DTYPE)
        first_text = next(iter(texts.values()))
        self.recall = Recall(
            self.runner,
            tokenizer,
            filler=tokenizer.encode(first_text[:FILLER_CHARS]),
            lengths=options.passkeys,
            codecs=self.codecs,
            keys=options.keys,
        )
        # cached for one row: its cases come one after another
        self._truth_of = lru_cache(maxsize=1)(self._exact)

    def cases(self, done: Sequence[Row] = ()) -> list[Case]:
        """The cases left to measure, all codecs of a row side by side."""
        measured = {
            (row["text"], row["row"], row["spec"], row.get("factor", 1)) for row in done
        }
        return [
            Case(text, row, codec, factor)
            for text, rows in self.rows.items()
            for row in range(len(rows))
            for factor in self.options.factors
            for codec in self.codecs
            if (text, row, self.specs[codec], factor) not in measured
        ]

    def measure(self, case: Case) -> Row:
        """The figures of one case.

        spec:       the codec with all its options, so that later defaults do not change it
        nll:        sum over the scored tokens, nats under exact KV
        delta, delta_squares: sums of the nats that the codec adds to each token, and of squares
        kl, top1:   sums of KL(exact || codec) in nats, and of equal best tokens
        same:       greedy tokens before the first that differs
        errors:     relative error of attention per layer, for the last queries of the prompt
        """
        tokens = self.rows[case.text][case.row]
        self._set_outliers(case.factor)
        truth = self._truth_of(case.text, case.row, case.factor)
        kv = PagedKV(self.runner, case.codec, truth.prompt, self.options.streaming)
        outputs = kv.attend(truth.prompt)
        logp = self._score(kv, tokens)
        next_tokens = tokens[self.options.prompt + 1 :]
        targets = torch.tensor(next_tokens, device=logp.device)[:, None]
        exact = -truth.logp.gather(1, targets)
        delta = -logp.gather(1, targets) - exact
        greedy_tokens = self._greedy(case.codec, truth.prompt, tokens)
        errors = [
            float((output - expected).norm() / expected.norm())
            for output, expected in zip(outputs, truth.outputs, strict=True)
        ]
        return {
            **asdict(case),
            "spec": self.specs[case.codec],
            "tokens": len(targets),
            "nll": float(exact.sum()),
            "delta": float(delta.sum()),
            "delta_squares": float(delta.square().sum()),
            "kl": float((truth.logp.exp() * (truth.logp - logp)).sum()),
            "top1": int((truth.logp.argmax(1) == logp.argmax(1)).sum()),
            "same": same_tokens(greedy_tokens, truth.greedy),
            "errors": [round(error, 5) for error in errors],
        }

    def sizes(self, spec: str) -> Row:
        """The bytes of a plan: at hand-off, and after an answer of `ANSWER_TOKENS`."""
        plan = parse_plan(spec, self.runner.shape)
        prompt = self.options.prompt
        bits = sum(len(group.layers) * bits_per_element(group) for group in plan.paged)
        return {
            "bits": round(bits / len(self.runner.info.layers), 3),
            "handoff_pct": round(percent_of_fp16(plan, prompt), 2),
            "answer_pct": round(percent_of_fp16(plan, prompt + ANSWER_TOKENS), 2),
        }

    def layers(self) -> Row:
        """How many layers codecs apply to, and what the others keep of a sequence."""
        shape = self.runner.shape
        return {
            "kv_layers": shape.num_layers,
            "state_layers": len(shape.states),
            "state_bytes": shape.state_bytes,
        }

    def _set_outliers(self, factor: int) -> None:
        outliers = None if factor == 1 else KeyOutliers(factor)
        self.runner.key_outliers = outliers

    def _exact(self, text: str, row: int, factor: int) -> _Truth:
        self._set_outliers(factor)
        tokens = self.rows[text][row]
        prompt = prefill(self.runner, tokens[: self.options.prompt])
        kv = PagedKV(self.runner, EXACT, prompt)
        return _Truth(
            prompt=prompt,
            outputs=kv.attend(prompt),  # before `_score` feeds tokens
            logp=self._score(kv, tokens),
            greedy=self._greedy(EXACT, prompt, tokens),
        )

    def _greedy(self, codec: str, prompt: PromptKV, tokens: Sequence[int]) -> list[int]:
        """Greedy tokens after the first scored one; their tails are always sealed."""
        kv = PagedKV(self.runner, codec, prompt)
        return greedy(kv, tokens[self.options.prompt], self.options.free)

    def _score(self, kv: PagedKV, tokens: Sequence[int]) -> Tensor:
        return kv.feed(tokens[self.options.prompt : -1]).log_softmax(1)


def _check_lengths(options: EvalOptions, context: int) -> None:
    more = max(options.score, options.free)
    if options.score < 2 or options.prompt + more > context:
        raise ConfigError(
            f"{options.prompt} + {more} tokens do not fit: 2 or more are scored, and "
            f"the context of the model is {context}"
        )


def percent_of_fp16(plan: Plan, tokens: int) -> float:
    """The bytes of K and V of a sequence in all layers, tail included, in percent of fp16.

    In layers with windows only tokens visible to the next one count, in both terms.
    """
    nbytes = plan.nbytes(tokens) - plan.state_bytes
    return 100 * nbytes / (FP16_BYTES * plan.numbers(tokens))
