"""What rounding the states of a hybrid model costs: in the next tokens, and in bytes saved.

    python -m benchmarks.states MODELS --text FILE --json --out FILE
    python -m benchmarks.states --configs FILE.jsonl

Prompts are computed as ever; then their answers are forced to be the text behind them. The tokens
that the model would have chosen are compared, position by position, with those behind exact states
and exact KV. So what is rounded once is judged by what comes 1, 100 and 1,000 tokens later. For
comparison: KV that is compressed beside exact states, and states that are forgotten.
"""

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from typer import Argument, Option

from benchmarks import command
from disagg.bench.result import Row, progress, result_of
from disagg.cli.bench import Out, show
from disagg.cli.options import Json
from disagg.codecs.planning import parse_plan
from disagg.config import DEFAULT_CODEC, EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sampler import Sampled
from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.sequence import Request, SamplingParams
from disagg.engine.sequence import Sequence as Answer
from disagg.engine.states import widen_states
from disagg.errors import ConfigError, ModelError
from disagg.eval.texts import cut_rows, read_text
from disagg.kv.page import BF16, EXACT, INT8, is_state_matrix
from disagg.model.capacity import kv_shape
from disagg.model.describe import describe_model
from disagg.model.runner import Runner
from disagg.model.states.records import StateRecords
from disagg.model.tokenizer import Tokenizer
from disagg.transfer.records import Manifest

FORGOTTEN = "forgotten"
CASES = (  # codec of the KV, form of the states
    ("raw", EXACT),
    ("raw", BF16),
    ("raw", INT8),
    ("raw", FORGOTTEN),
    ("int8", EXACT),
    (DEFAULT_CODEC, EXACT),
    (DEFAULT_CODEC, INT8),
)
WINDOW = 10  # tokens over which a divergence is averaged
MARKS = (10, 100, 1000)  # ends of such windows, in decoded tokens
LENGTHS = (1024, 8192, 32_768)  # of prompts whose bytes are computed
NOTES = (
    "KL in nats a token, against exact states and KV; means over prompts, of "
    f"{WINDOW} tokens up to each mark"
)
BYTES_NOTES = "bytes of the records of a hand-off, by arithmetic"


@dataclass(frozen=True)
class Text:
    """Rows of tokens: the first `prompt` of each are a prompt, the others its answer."""

    rows: Sequence[Sequence[int]]
    prompt: int

    @property
    def answer(self) -> int:
        return len(self.rows[0]) - self.prompt


@dataclass
class Judgement:
    """Divergences and losses of forced answers, by prompt and position.

    truth: log-probabilities [answer, V] of the exact run, by prompt; empty: this is that run
    """

    text: Text
    truth: dict[str, Tensor] = field(default_factory=dict)
    choices: dict[str, list[Tensor]] = field(default_factory=dict)
    divergence: dict[str, list[float]] = field(default_factory=dict)
    loss: dict[str, list[float]] = field(default_factory=dict)

    def choose(
        self, entries: Sequence[ScheduledTokens], logits: Tensor, *_: object
    ) -> list[list[Sampled]]:
        """The next tokens of the text, in place of those that the model would choose."""
        answers = [entry.sequence for entry in entries]
        return [[self._judge(*pair)] for pair in zip(answers, logits, strict=True)]

    def _judge(self, answer: Answer, logits: Tensor) -> Sampled:
        rid, index = answer.rid, len(answer.emitted)
        token = self.text.rows[int(rid)][self.text.prompt + index]
        choice = logits.double().log_softmax(-1)
        self.loss.setdefault(rid, []).append(-float(choice[token]))
        if self.truth:
            truth = self.truth[rid][index]
            divergence = (truth.exp() * (truth - choice)).sum()
            self.divergence.setdefault(rid, []).append(float(divergence))
        else:
            self.choices.setdefault(rid, []).append(choice)
        return Sampled(token)

    def row(self) -> Row:
        """The figures; the first token of an answer is of the prompt's own step."""
        losses = [loss for each in self.loss.values() for loss in each[1:]]
        row: Row = {"loss": sum(losses) / len(losses)}
        for mark in MARKS if self.truth else ():
            if mark <= self.text.answer - 1:
                window = slice(mark - WINDOW + 1, mark + 1)
                kl = [x for each in self.divergence.values() for x in each[window]]
                row[f"kl_{mark}"] = sum(kl) / len(kl)
        return row


@contextmanager
def forgetting() -> Iterator[None]:
    """States are zero behind each prompt."""

    def widen_and_forget(answer: Answer, arena: Tensor) -> list[int]:
        pages = widen_states(answer, arena)
        groups = answer.groups[len(answer.plan.paged) :]
        for group, state in zip(answer.plan.states, groups, strict=True):
            assert state.side is not None
            records = StateRecords(arena, group.page)
            for name, value in records.views(state.side).items():
                if is_state_matrix(records.planes[name]):
                    value.zero_()
        return pages

    with patch("disagg.engine.engine.widen_states", widen_and_forget):
        yield


def judge(
    runner: Runner, text: Text, codec: str, form: str, truth: Mapping[str, Tensor]
) -> Judgement:
    """Serve all prompts of a text, with answers that are forced."""
    judgement = Judgement(text, dict(truth))
    is_forgotten = form == FORGOTTEN
    engine = Engine(
        runner, EngineConfig(speculative_tokens=0), state=BF16 if is_forgotten else form
    )
    params = SamplingParams(max_tokens=text.answer, ignore_eos=True)
    for rid, row in enumerate(text.rows):
        prompt = tuple(row[: text.prompt])
        engine.submit(Prefill(Request(str(rid), prompt, params, codec)))
    with (
        patch("disagg.engine.engine.choose", judgement.choose),
        forgetting() if is_forgotten else nullcontext(),
    ):
        while not engine.idle:
            output = engine.step()
            for failed in output.failed:
                raise failed.error
    return judgement


def measure_states(runner: Runner, text: Text, name: str) -> list[Row]:
    """A row for each codec and form, the exact one first."""
    rows: list[Row] = []
    truth: dict[str, Tensor] = {}
    for codec, form in progress(CASES, "{0[0]}, states {0[1]}".format):
        judgement = judge(runner, text, codec, form, truth)
        figures = judgement.row()
        if not truth:
            truth = {rid: torch.stack(x) for rid, x in judgement.choices.items()}
            exact_loss = figures["loss"]
        figures["perplexity"] = math.exp(figures["loss"])
        figures["perplexity_change"] = math.expm1(figures["loss"] - exact_loss)
        rows.append({"model": name, "codec": codec, "states": form} | figures)
    return rows


def random_text(vocabulary: int, prompt: int, answer: int, count: int) -> Text:
    """For random weights, to which no text means more than another."""
    source = torch.Generator().manual_seed(0)
    size = (count, prompt + answer)
    return Text(torch.randint(vocabulary, size, generator=source).tolist(), prompt)


def size_rows(configs: Path) -> Iterator[Row]:
    """Bytes of the states and hand-offs of the hybrid models of a file, a config in each line."""
    for line in configs.read_text(encoding="utf8").splitlines():
        entry = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(entry["config"]), encoding="utf8")
            try:
                info = describe_model(folder, "bfloat16", device="cuda")
            except (ModelError, ConfigError):
                continue
            for form in (EXACT, BF16, INT8) if info.states else ():
                plan = parse_plan(DEFAULT_CODEC, kv_shape(info, form))
                yield {
                    "model": entry["name"],
                    "states": form,
                    "state_bytes": plan.wire_state_bytes,
                    **{f"at_{n}": Manifest(plan, n).total_bytes for n in LENGTHS},
                }


def states(
    models: list[str] | None = Argument(None, help="Folders of hybrid models."),
    text: str | None = Option(None, help="File of a text; default: random tokens."),
    prompt: int = Option(1024, help="Tokens of a prompt."),
    answer: int = Option(1001, help="Tokens behind it."),
    count: int = Option(8, help="Number of prompts."),
    configs: Path | None = Option(
        None, help="Instead: a file of configs, whose bytes are computed."
    ),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what rounding the states of hybrid models costs."""
    if configs is not None:
        show(result_of(size_rows(configs), BYTES_NOTES), out, as_json)
        return
    if not models:
        raise ConfigError("no model; expected folders, or --configs")
    rows: list[Row] = []
    for model in models:
        runner = Runner.load(model)
        if not runner.shape.states:
            raise ConfigError(f"{model} keeps no states; expected a hybrid model")
        tokens = _text_for(runner, model, text, (prompt, answer, count))
        rows += measure_states(runner, tokens, Path(model).name)
    show(result_of(rows, NOTES), out, as_json)


def _text_for(
    runner: Runner, model: str, text: str | None, sizes: tuple[int, int, int]
) -> Text:
    """sizes: tokens of a prompt and behind it, and the number of prompts"""
    prompt, answer, count = sizes
    if text is None:
        return random_text(runner.info.vocab_size, prompt, answer, count)
    _, content = read_text(text)
    rows = cut_rows(content, Tokenizer.load(model), prompt + answer, count)
    return Text(rows, prompt)


if __name__ == "__main__":
    command.main(states, "states")
