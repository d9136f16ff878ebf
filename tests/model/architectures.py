"""Which architectures are served, tried out on small random models, as docs/models.md.

    python -m tests.model.architectures --out docs/models.md

Greedy tokens under the `raw` codec against `generate` of transformers, or the refusal.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import transformers

from disagg.bench.result import progress
from disagg.errors import ModelError
from disagg.model.describe import ModelInfo, describe_model
from disagg.model.runner import Runner
from tests.engine.margins import assert_same
from tests.engine.serving import make_engine, serve
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_config, save_tiny

PLAIN = "apertus arcee bitnet cohere ernie4_5 gemma glm glm4 gpt2 gpt_bigcode gpt_neox gptj "
PLAIN += "granite helium hunyuan_v1_dense internlm3 jais2 llama ministral3 nanochat olmo olmo2 "
PLAIN += "opt phi phi3 qwen2 qwen3 seed_oss smollm3 "
WINDOWED = "afmoe cohere2 exaone4 gemma2 gemma3_text gpt_oss granite_swa ministral mistral olmo3 "
WINDOWED += "starcoder2 vaultgemma "
EXPERTS = "cohere2_moe dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe granitemoe hunyuan_v1_moe "
EXPERTS += "minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe solar_open "
PROBED = "gemma4_text nemotron "  # refused when their weights have loaded
OTHERS = "bamba biogpt bloom deepseek_v3 falcon falcon_h1 gemma3n_text granitemoehybrid jamba "
OTHERS += "kimi_linear lfm2 llama4_text minimax mpt qwen3_5_text qwen3_next stablelm"
KINDS = (PLAIN + WINDOWED + EXPERTS + PROBED + OTHERS).split()
LENGTHS, ANSWER = (5, 37, 70), 24
SERVED = f"the tokens of `generate`, prompts of {', '.join(map(str, LENGTHS))}, {ANSWER} generated"
HEAD = f"""# Models

Small random models of each architecture, tried out with transformers {transformers.__version__} by
`python -m tests.model.architectures --out docs/models.md`: exact pages (`raw`) against `generate`,
or the reason of the refusal. `disagg models check REF` says the same of a real one from its config,
with the tokens that fit into `--memory`; what a config cannot say is found out by a probe when the
weights load.

Caps of scores (`gemma2`, `vaultgemma`) and sinks (`gpt_oss`) are computed in all kernels; of
prompts, which attend exactly, without a fused kernel of torch. `gpt_oss` is tried out in fp32. The
experts of its real checkpoints are in mxfp4: transformers computes in that with the package
`kernels` on a GPU of capability 7.5 or more, and else unpacks them to bf16 while it loads, at 2
bytes a parameter. Neither was tried here.

Contexts of LongRoPE (Phi-3, Phi-4-mini) end where its frequencies would switch, at the length of
the original training: answers up to there are those of `generate`, and beyond none is given.

| architecture | heads / KV heads x dim | windows of layers | result |
|---|---|---|---|
"""


def table() -> str:
    return HEAD + "".join(f"{row}\n" for row in rows())


def rows() -> Iterator[str]:
    for kind in progress(KINDS, str):
        with tempfile.TemporaryDirectory() as folder:
            shape, result = try_out(kind, Path(folder))
        yield f"| `{kind}` | {shape} | {result} |"


def try_out(kind: str, folder: Path) -> tuple[str, str]:
    """Shape and windows of a small model, and what came of it."""
    shape = " | "
    try:
        shape = shape_of(describe_model(str(save_config(kind, folder))))
        path = str(save_tiny(kind, folder))
        runner = Runner.load(path)
    except ModelError as error:
        return shape, f"refused: {' '.join(str(error).split())}"
    prompts, reference = [random_prompt(n) for n in LENGTHS], ReferenceModel(path)
    engine = make_engine(runner, max_batch_tokens=29)
    expected = [reference.generate(prompt, ANSWER) for prompt in prompts]
    assert len({token for answer in expected for token in answer.tokens}) > 5, (
        "too easy to say"
    )
    for answer, right in zip(
        serve(engine, prompts, "raw", ANSWER), expected, strict=True
    ):
        assert_same(answer, right)
    return shape, SERVED


def shape_of(info: ModelInfo) -> str:
    """Two cells."""
    windows = ", ".join(
        "all" if window is None else str(window) for window in info.windows
    )
    return f"{info.query_heads} / {info.heads} x {info.head_dim} | {windows}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="where the page is written"
    )
    parser.parse_args().out.write_text(table())


if __name__ == "__main__":
    main()
