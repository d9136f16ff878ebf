"""How answers depend on where their prompts are cut into chunks, in one process.

    python -m benchmarks.chunk_borders --json --out FILE
    python -m benchmarks.chunk_borders --codec kivi --codec raw

Each prompt is answered alone, without a prefix cache and without drafts: once computed whole, then
in chunks. Nothing else differs between the two, so what differs in the answers comes from the last
bits of sums over other numbers of rows. After a failure a prompt is computed again in other chunks.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch
from typer import Option

from benchmarks import command
from disagg.bench.result import Row, announce, result_of
from disagg.bench.workers import prompt_of
from disagg.cli.bench import Out, show, without_none
from disagg.cli.checks import check_codecs
from disagg.cli.options import Json, Model
from disagg.config import DEFAULT_CODEC, EngineConfig
from disagg.engine.sequence import SamplingParams
from disagg.llm import LLM

WHOLE = 2048  # tokens of a chunk: more than any of the prompts has
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7},
}
NOTES = "different: answers with another token than that of the prompt computed whole"


@dataclass(frozen=True)
class ChunkBordersOptions:
    """Prompts, answers and chunks.

    lengths: of the prompts, in tokens
    tokens:  per answer
    chunks:  their most tokens
    """

    model: str | None = None
    codecs: Sequence[str] = ("raw", DEFAULT_CODEC)
    lengths: Sequence[int] = tuple(range(300, 1100, 100))
    tokens: int = 60
    chunks: Sequence[int] = (256, 96)


def measure_chunk_borders(options: ChunkBordersOptions) -> Row:
    """A row for every codec, way of sampling, and size of chunks."""
    torch.set_num_threads(1)
    rows = []
    for codec, (sampling, params) in product(options.codecs, SAMPLINGS.items()):
        whole = _answers(options, codec, WHOLE, params)
        for chunk in options.chunks:
            cut = _answers(options, codec, chunk, params)
            row = {
                "codec": codec,
                "answers": sampling,
                "chunk": chunk,
                "count": len(whole),
                "different": sum(a != b for a, b in zip(whole, cut, strict=True)),
            }
            announce(" ".join(map(str, row.values())))
            rows.append(row)
    return result_of(rows, NOTES, options=asdict(options))


def _answers(
    options: ChunkBordersOptions, codec: str, chunk: int, sampling: dict[str, float]
) -> list[tuple[int, ...]]:
    config = EngineConfig(
        max_batch_tokens=chunk, prefix_cache=False, speculative_tokens=0
    )
    llm = LLM(options.model, codec=codec, config=config)
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    prompts = [prompt_of(n, n, options.model) for n in options.lengths]
    return [tuple(llm.generate([prompt], params)[0].tokens) for prompt in prompts]


def chunk_borders(
    model: Model = None,
    codec: list[str] | None = Option(
        None, "--codec", help="Codec spec; may be repeated; default: raw, the default."
    ),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Count the answers that change with the chunks of their prompts."""
    check_codecs(model, codec or [])
    options = ChunkBordersOptions(model, **without_none(codecs=codec))
    show(measure_chunk_borders(options), out, as_json)


if __name__ == "__main__":
    command.main(chunk_borders, "chunk_borders")
