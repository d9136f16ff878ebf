"""Does the whole path give, token for token, what transformers gives? With exact KV it must.

    python -m tests.model.exactness --json --out benchmarks/results/exactness.json

Greedy continuations of prompts of 5 to 1500 tokens, one by one and all in one ragged batch, under
the `raw` codec in the model's dtype, against unbatched `generate` of transformers in fp32.
A differing token where the reference's two best logits were closer than 1e-4 is a tie; the tokens
behind any difference are not compared, since they continue another text.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from disagg.bench.result import Row, progress, result_of, write
from disagg.model.describe import describe_model
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer
from tests.engine.serving import make_engine, serve
from tests.model.reference import Reference, ReferenceModel

TIE = 1e-4  # logits
SHORTEST, LONGEST = 5, 1500  # tokens of a prompt


def measure(ref: str | None, text: Path | None, prompts: int, max_tokens: int) -> Row:
    """Compare `prompts` continuations of a model, both ways.

    smallest_margin: the closest call among the reference's tokens
    """
    codec = "raw:dtype=model"
    inputs = make_prompts(ref, text, prompts)
    reference = ReferenceModel(ref)
    shown_inputs = progress(
        inputs, lambda prompt: f"the reference, {len(prompt)} tokens"
    )
    expected = [reference.generate(prompt, max_tokens) for prompt in shown_inputs]
    engine = make_engine(Runner.load(ref), arena_bytes=1 << 30)

    started = time.perf_counter()
    shown_inputs = progress(inputs, lambda prompt: f"one by one, {len(prompt)} tokens")
    alone = [
        serve(engine, [prompt], codec, max_tokens, ignore_eos=True)[0]
        for prompt in shown_inputs
    ]
    middle = time.perf_counter()
    together = serve(engine, inputs, codec, max_tokens, ignore_eos=True)
    ended = time.perf_counter()
    return {
        "model": describe_model(ref).architecture,
        "codec": codec,
        "lengths": [len(prompt) for prompt in inputs],
        "max_tokens": max_tokens,
        "smallest_margin": min(min(x.margins) for x in expected),
        "one_by_one": compare(alone, expected, middle - started),
        "ragged": compare(together, expected, ended - middle),
    }


def make_prompts(ref: str | None, text: Path | None, count: int) -> list[list[int]]:
    """Prompts of 5 to 1500 tokens: passages of a text, or random tokens without one."""
    vocab, longest = describe_model(ref).vocab_size, LONGEST
    source = random.Random(0)
    lengths = [
        SHORTEST + (longest - SHORTEST) * i // max(1, count - 1) for i in range(count)
    ]
    if text is None:
        return [[source.randrange(vocab) for _ in range(n)] for n in lengths]
    tokens = Tokenizer.load(ref).encode(text.read_text())
    starts = [source.randrange(len(tokens) - n) for n in lengths]
    return [tokens[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def compare(
    answers: Sequence[Sequence[int]], expected: Sequence[Reference], seconds: float
) -> Row:
    """Count the first difference of each answer: a mismatch, or a tie of the reference.

    compared: tokens up to the first difference of each prompt, that one included
    """
    compared = mismatches = ties = 0
    for answer, truth in zip(answers, expected, strict=True):
        assert len(answer) == len(truth.tokens)
        for token, right, margin in zip(
            answer, truth.tokens, truth.margins, strict=True
        ):
            compared += 1
            if token != right:
                if margin >= TIE:
                    mismatches += 1
                else:
                    ties += 1
                break
    return {
        "prompts": len(answers),
        "tokens": sum(map(len, answers)),
        "compared": compared,
        "mismatches": mismatches,
        "ties": ties,
        "seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", help="folder or cached name; the packaged model unless given"
    )
    parser.add_argument("--text", type=Path, help="prompts are passages of this file")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument(
        "--tokens", type=int, default=128, help="generated for each prompt"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object instead of lines"
    )
    parser.add_argument("--out", type=Path, help="write the JSON object here too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = measure(
        arguments.model, arguments.text, arguments.prompts, arguments.tokens
    )
    record = result_of([result], "greedy, fp32, against generate")
    if arguments.out:
        write(record, arguments.out)
    if arguments.json:
        print(json.dumps(record))
        return
    print("{model}, {codec}, prompts of {lengths} tokens".format(**result))
    for name in ("one_by_one", "ragged"):
        summary = "{mismatches} mismatches, {ties} ties in {compared} tokens".format(
            **result[name]
        )
        print(f"{name}: {summary}")


if __name__ == "__main__":
    main()
