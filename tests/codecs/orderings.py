"""Do the papers' orderings of methods hold on these keys and values?

    python -m tests.codecs.orderings --text FILE [--kv FILE] [--json]

K and V come from the generator, from a prefill of the default model over a text, or from a
safetensors file with k.L, v.L [H, n, D] (and q.L [Hq, m, D]). Errors are relative Frobenius norms
over the tokens that every codec has sealed; an output is attention over these tokens alone.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from disagg.bench.inputs import Knobs, generate
from disagg.codecs import get_codec
from disagg.model.attention import Batch, Chunk
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer
from disagg.paged.compressed_kv import compress
from tests.synthetic import relative_error

LAYER = 2  # the first layer that OTT does not treat specially
TAIL_AND_PAGE = 192  # no codec keeps more than a tail and an unfinished page
SPECS = (
    "pertoken:bits=2,group=32",
    "kivi:bits=2,group=32,residual=0",
    "kivi:bits=2,group=64,residual=0",
    "gear-l:bits=2,backbone=kivi,group=64",
    "gear:bits=2,backbone=kivi,group=64",
    "kcvt:bits=4",
    "gear-l:bits=4,backbone=kcvt",
    "gear:bits=4,backbone=kcvt",
    "ott:group=128,outliers=0,aux=0,residual=0",
    "ott:group=128,outliers=1,aux=0,residual=0",
    "ott:group=128,outliers=8,aux=0,residual=0",
    "pertoken:bits=4,group=64",
    "decoquant:bits=4,block=16",
    "decoquant:bits=4,block=64",
    "int8",
    "fp8",
)


@dataclass(frozen=True)
class Errors:
    """Relative errors of one codec: of K, of V, of attention outputs (None without queries)."""

    spec: str
    k: float
    v: float
    output: float | None


@dataclass(frozen=True)
class Source:
    """Where K and V are from: q [Hq, m, D] or None, k, v [H, n, D]."""

    name: str
    q: Tensor | None
    k: Tensor
    v: Tensor


def compare(source: Source, specs: Sequence[str]) -> dict[str, Errors]:
    k, v = source.k.half(), source.v.half()
    n = max(128, (k.shape[1] - TAIL_AND_PAGE) // 128 * 128)
    exact_k, exact_v = k[:, :n].float(), v[:, :n].float()
    errors = {}
    for spec in specs:
        cache = compress(get_codec(spec), k, v, LAYER)
        new_k, new_v = (x[:, :n] for x in cache.reconstruct())
        output = None
        if source.q is not None:
            exact = outputs(source.q, exact_k, exact_v)
            output = relative_error(outputs(source.q, new_k, new_v), exact)
        errors[spec] = Errors(
            spec=spec,
            k=relative_error(new_k, exact_k),
            v=relative_error(new_v, exact_v),
            output=output,
        )
    return errors


def outputs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q [Hq, m, D] over all of k, v [H, n, D], without a mask: [Hq, m, D] fp32."""
    width = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(width, 0), v.repeat_interleave(width, 0)
    scores = q.float() @ k.transpose(1, 2) / q.shape[2] ** 0.5
    return scores.softmax(-1) @ v


def make_source(
    name: str, seed: int, sink: float, outliers: int, n: int = 1216
) -> Source:
    knobs = Knobs(n=n, num_queries=32, sink=sink, outliers=outliers)
    layer = generate(seed, knobs)
    return Source(name, layer.q, layer.k, layer.v)


def prefill_sources(text: str, tokens: int, layers: Sequence[int]) -> Iterator[Source]:
    """Layers of the default model, prefilled over a text."""
    runner = Runner.load()
    ids = Tokenizer.load(runner.info.path).encode(text)[:tokens]
    kv: dict[int, tuple[Tensor, Tensor]] = {}

    def sink(layer: int, k: Tensor, v: Tensor, _: Chunk) -> None:
        kv[layer] = (k.clone(), v.clone())

    chunk = Chunk(0, len(ids), 0, runner.workspace(len(ids)), sink)
    arena = torch.zeros(128, dtype=torch.uint8)
    runner.forward(Batch(ids, range(len(ids)), [len(ids) - 1], arena, (chunk,)))
    for layer in layers:
        yield Source(f"default model, layer {layer}", None, *kv[layer])


def load_sources(path: Path) -> Iterator[Source]:
    arrays = load_file(path)
    for name in sorted(x for x in arrays if x.startswith("k.")):
        layer = name.removeprefix("k.")
        title = f"{path.stem}, layer {layer}"
        yield Source(
            title, arrays.get(f"q.{layer}"), arrays[name], arrays[f"v.{layer}"]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--text", type=Path, help="prefill the default model over this file"
    )
    parser.add_argument("--kv", type=Path, help="a safetensors file of k.L and v.L")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sources = [
        make_source("content heads", 0, 0.5, 2),
        make_source("sink heads", 0, 1.0, 8),
    ]
    if options.text:
        sources += prefill_sources(options.text.read_text(), 1500, (0, 2, 5))
    if options.kv:
        sources += load_sources(options.kv)
    results = [(source.name, compare(source, SPECS)) for source in sources]
    if options.json:
        print(
            json.dumps(
                {name: [asdict(x) for x in row.values()] for name, row in results}
            )
        )
        return
    for name, row in results:
        print(name)
        for errors in row.values():
            output = "" if errors.output is None else f"{errors.output:8.4f}"
            print(
                f"  {errors.spec:40} K {errors.k:7.4f}  V {errors.v:7.4f}  output {output}"
            )


if __name__ == "__main__":
    main()
