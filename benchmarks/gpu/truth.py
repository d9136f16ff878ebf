"""Step 4: greedy answers on exact pages are those of transformers, on the same device.

The packaged model and small random ones of served families, in fp32. An answer may
differ from `generate` only after a tie; recorded steps and eager ones must choose the
same tokens.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.compiling import Compiles
from benchmarks.gpu.setting import Setting
from disagg.bench.result import Row
from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.errors import ModelError
from disagg.model.describe import describe_model
from disagg.model.graphs import DecodeGraphs, Recording
from disagg.model.runner import Runner

PACKAGED = "packaged"
FAMILIES = (
    "llama gemma2 gpt_oss qwen3 mistral gemma3_text mixtral gpt2 qwen3_moe olmo2 phi3 "
)
FAMILIES += (
    "granite cohere2 opt gptj gpt_neox olmoe afmoe starcoder2 glm4_moe vaultgemma"
)
REHEARSED = ("llama",)
LENGTHS, ANSWER = (5, 37, 70), 24
TIE = 1e-3  # logits: a sum in another order may tip such a choice
KIVI, WITH_KIVI = "kivi:bits=4", (PACKAGED, "llama")
ARENA_BYTES = 32 << 20
TEXT = "The old house by the river had stood empty for years, and nobody asked who had built it. "

Answer = tuple[int, ...]


class EagerRecorder:
    """In place of CUDA graphs where there is no GPU: a replay runs the same call
    again.
    """

    def record(self, call: Callable[[], Tensor]) -> Recording:
        output = call().clone()
        return Recording(lambda: output.copy_(call()), output)


def rows(setting: Setting) -> Iterator[Row]:
    """A row for every model."""
    names = REHEARSED if setting.rehearsal else (PACKAGED, *FAMILIES.split())
    for name in names:
        with tempfile.TemporaryDirectory(dir=setting.scratch) as folder:
            yield try_out(name, Path(folder), setting.device)


def try_out(name: str, folder: Path, device: torch.device) -> Row:
    """Serve a few prompts and compare; `failure` says what differs."""
    row: Row = {"model": name}
    compiles = Compiles()
    try:
        with compiles.counting():
            row |= _compare(name, folder, device)
    except (
        ModelError
    ) as error:  # a family that this version of transformers has otherwise
        return row | {"refused": " ".join(str(error).split())[:200]}
    except Exception as error:
        return row | {"failure": f"{type(error).__name__}: {error}"[:300]}
    return row | {"compiled": compiles.count, "compile_s": compiles.seconds}


def _compare(name: str, folder: Path, device: torch.device) -> Row:
    path = None if name == PACKAGED else _save(name, folder)
    runner = Runner.load(path, "float32", device.type)
    if runner.graphs is None:
        runner.record_steps(EagerRecorder())  # type: ignore[arg-type]
    prompts = _prompts(runner)
    codecs = ("raw", KIVI) if name in WITH_KIVI else ("raw",)
    recorded = [serve(runner, prompts, x) for x in codecs]
    graphs, runner.graphs = runner.graphs, None
    eager = [serve(runner, prompts, x) for x in codecs]
    model = _reference(path, device)
    expected = [generate(model, prompt) for prompt in prompts]
    row: Row = {"tokens": len(prompts) * ANSWER, **_count(graphs)}
    row["ties"], faults = _faults_of(recorded[0], expected)
    if recorded[0] != eager[0]:
        faults.append("recorded steps choose other tokens than eager ones")
    if recorded[1:] != eager[1:]:  # a rounding of a code may tip
        row["kivi_differs"] = True
    if faults:
        row["failure"] = "; ".join(faults)
    return row


def _faults_of(
    answers: Sequence[Answer], expected: Sequence[tuple[Answer, list[float]]]
) -> tuple[int, list[str]]:
    """How many answers differ from the expected ones, and those that do without a tie."""
    differing = 0
    faults = []
    for answer, (right, margins) in zip(answers, expected, strict=True):
        differing += answer != right
        fault = _differs(answer, right, margins)
        if fault:
            faults.append(f"raw is not generate: {fault}")
    return differing, faults


def _save(name: str, folder: Path) -> str:
    from tests.model.tiny import save_tiny  # small models are the tests'

    return str(save_tiny(name, folder))


def _prompts(runner: Runner) -> list[list[int]]:
    """Token ids that any model knows, of three lengths."""
    source = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (n,), generator=source).tolist() for n in LENGTHS]


def _count(graphs: DecodeGraphs | None) -> Row:
    """Steps that were recorded, and those that could not be."""
    steps = [] if graphs is None else list(graphs._recorded.values())
    return {
        "recorded": sum(step is not None for step in steps),
        "unrecorded": steps.count(None),
    }


def serve(runner: Runner, prompts: Sequence[Sequence[int]], codec: str) -> list[Answer]:
    """The greedy answers to prompts that come together."""
    engine = Engine(runner, EngineConfig(arena_bytes=ARENA_BYTES, max_batch_tokens=29))
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Prefill(Request(str(number), tuple(prompt), params, codec)))
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while not engine.idle:
        output = engine.step()
        for failed in output.failed:
            raise failed.error
        for token in output.tokens:
            tokens[token.rid].append(token.token)
    return [tuple(x) for x in tokens.values()]


def _reference(path: str | None, device: torch.device) -> PreTrainedModel:
    folder = describe_model(path, "float32").path
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    )
    return model.to(device).eval()


def generate(
    model: PreTrainedModel, prompt: Sequence[int]
) -> tuple[Answer, list[float]]:
    """The greedy answer of transformers, and how far ahead each token was, in
    logits.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    how = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "eos_token_id": None}
    how |= {"pad_token_id": 0, "do_sample": False, "output_logits": True}
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        result = model.generate(
            ids, attention_mask=mask, return_dict_in_generate=True, **how
        )
    best = torch.cat(result.logits).float().topk(2).values
    answer = tuple(result.sequences[0, len(prompt) :].tolist())
    return answer, (best[:, 0] - best[:, 1]).tolist()


def _differs(answer: Answer, expected: Answer, margins: Sequence[float]) -> str:
    """Where an answer leaves the expected one without a tie; "" if it does not."""
    pairs = enumerate(zip(answer, expected, strict=True))
    first = next((i for i, (x, y) in pairs if x != y), None)
    if first is None or margins[first] < TIE:
        return ""
    return f"token {first}, which was ahead by {margins[first]:.3g}"


def headline(rows: list[Row]) -> list[str]:
    """How many models answer alike, and which steps could not be recorded."""
    alike = [row for row in rows if "tokens" in row and "failure" not in row]
    exceptions = {
        "steps that cannot be recorded": [x["model"] for x in alike if x["unrecorded"]],
        "kivi differs between recorded and eager steps": _models_with(
            "kivi_differs", alike
        ),
        "refused": _models_with("refused", rows),
    }
    lines = [f"{len(alike)} of {len(rows)} models answer as generate does"]
    for what, models in exceptions.items():
        if models:
            lines.append(f"{what}: {', '.join(models)}")
    return lines


def _models_with(key: str, rows: list[Row]) -> list[str]:
    return [row["model"] for row in rows if key in row]
