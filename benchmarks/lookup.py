"""What look-up speculation gains, by the kind of answer.

    python -m benchmarks.lookup --json --out FILE

One model answers the same prompts with and without drafts, by turns: a summary with quotes, an edit
of code, a copy, JSON, an open chat, and random tokens. Times are of the processor, from the first
token to the last. Answers are greedy, but for the random ones, and must be equal.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from typer import Option

from benchmarks import command
from benchmarks.command import Dtype, Model
from disagg.bench.result import Row, progress, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, Rounds, show, without_none
from disagg.cli.options import Json
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.lookup import CPU_DRAFT
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.errors import ConfigError
from disagg.model.chat import ChatTemplate
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
NOTES = "processor time from the first token of an answer to the last; medians of rounds by turns"
STORY = (ROOT / "docs" / "story.txt").read_text()[:2600]
CODE = (ROOT / "disagg" / "kv" / "state.py").read_text()[1200:3200]
ASKS = {
    "quoting": f"Summarise this text in a few sentences, with quotes from it:\n\n{STORY}",
    "edit": "Rewrite this code. Rename `pages` to `ids` and change nothing else. Print all "
    f"of it.\n\n```python\n{CODE}\n```",
    "copy": f"Repeat this text and correct mistakes:\n\n{STORY[:1200]}",
    "json": "List the planets as JSON objects with the keys name, radius_km, moons.",
    "chat": "Explain in a few paragraphs how a bicycle stays upright.",
}
RANDOM = "random"  # tokens without any pattern, and sampled ones behind them
RANDOM_TOKENS = 512
COLUMNS = ["ask", "tokens", "steps", "drafted", "accepted", "plain_ms", "ms", "ratio"]


@dataclass(frozen=True)
class LookUpOptions:
    """What to answer, and how.

    answer: tokens of an answer
    draft:  tokens of a draft at most
    """

    model: str = "smollm2"
    codec: str = "banded:bits=3"
    dtype: str = "auto"
    answer: int = 192
    draft: int = CPU_DRAFT
    rounds: int = 3
    threads: int = 2


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, its steps, and the milliseconds of a token."""

    tokens: list[int]
    steps: int
    token_ms: float
    counts: dict[str, int]


def measure_lookup(options: LookUpOptions) -> Row:
    """Every kind of answer, with and without drafts."""
    torch.set_num_threads(options.threads)
    runner = Runner.load(options.model, options.dtype)
    prompts = make_prompts(options.model, runner.info.vocab_size)
    rows = [
        _compare(runner, ask, prompts[ask], options)
        for ask in progress([*prompts], "{}".format)
    ]
    return result_of(rows, NOTES)


def make_prompts(model: str, vocab_size: int) -> dict[str, list[int]]:
    """Tokens of a prompt for each kind of answer."""
    tokenizer, chat = Tokenizer.load(model), ChatTemplate.load(model)
    if chat is None:
        raise ConfigError(f"model {model!r} has no chat template; choose one that has")
    prompts = {}
    for ask, text in ASKS.items():
        messages = [{"role": "user", "content": text}]
        rendered = chat.render(messages, add_generation_prompt=True)
        prompts[ask] = tokenizer.encode(rendered, special=False)
    generator = torch.Generator().manual_seed(0)
    shape = (RANDOM_TOKENS,)
    prompts[RANDOM] = torch.randint(vocab_size, shape, generator=generator).tolist()
    return prompts


def _compare(
    runner: Runner, ask: str, prompt: Sequence[int], options: LookUpOptions
) -> Row:
    temperature = 1.0 if ask == RANDOM else 0.0
    params = SamplingParams(
        max_tokens=options.answer, temperature=temperature, ignore_eos=True
    )
    request = Request(ask, tuple(prompt), params, options.codec)
    plain, drafted = [], []
    for _ in range(options.rounds):
        plain.append(_answer(runner, request, draft=0))
        drafted.append(_answer(runner, request, options.draft))
    last = drafted[-1]
    plain_ms = statistics.median(answer.token_ms for answer in plain)
    token_ms = statistics.median(answer.token_ms for answer in drafted)
    return {
        "ask": ask,
        "prompt": len(prompt),
        "tokens": len(last.tokens),
        "equal": last.tokens == plain[-1].tokens,
        "steps": last.steps,
        "drafted": last.counts.get("draft_tokens", 0),
        "accepted": last.counts.get("accepted_tokens", 0),
        "plain_ms": plain_ms,
        "ms": token_ms,
        "ratio": plain_ms / token_ms,
    }


def _answer(runner: Runner, request: Request, draft: int) -> Answer:
    engine = Engine(runner, EngineConfig(speculative_tokens=draft))
    engine.submit(Prefill(request))
    tokens: list[int] = []
    steps = 0
    began = ended = 0.0
    while not engine.idle:
        new_tokens = [token.token for token in engine.step().tokens]
        if not new_tokens:
            continue
        ended = time.process_time()
        began = began or ended
        steps += 1
        tokens += new_tokens
    token_ms = 1e3 * (ended - began) / (len(tokens) - 1)
    return Answer(tokens, steps - 1, token_ms, dict(engine.counts))


def draw(result: Row) -> str:
    """The result as a table."""
    return table(result["rows"], COLUMNS)


def lookup(
    model: Model = None,
    dtype: Dtype = None,
    answer: int | None = Option(None, min=2, help="Tokens of an answer."),
    draft: int | None = Option(None, min=2, help="Tokens of a draft."),
    rounds: Rounds = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Look-up speculation, by the kind of answer."""
    fields = without_none(
        model=model, dtype=dtype, answer=answer, draft=draft, rounds=rounds
    )
    show(measure_lookup(LookUpOptions(**fields)), out, as_json, draw)


if __name__ == "__main__":
    command.main(lookup, "lookup")
