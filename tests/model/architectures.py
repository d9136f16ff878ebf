"""Which architectures are served, tried out on small random models, as docs/models.md.

    python -m tests.model.architectures --out docs/models.md

Greedy tokens under the `raw` codec against `generate` of transformers, or the refusal.
"""

import argparse
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

import transformers

from disagg.bench.result import progress
from disagg.errors import ModelError
from disagg.model.describe import describe_model
from disagg.model.runner import Runner
from tests.engine.margins import assert_same
from tests.engine.serving import make_engine, serve
from tests.model import families
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt, save_config, save_tiny

FAMILIES = {
    "AFMoE, Arcee": "afmoe arcee",
    "Apertus, nanochat": "apertus nanochat",
    "BitNet": "bitnet",
    "Cohere": "cohere cohere2 cohere2_moe",
    "dots1, Solar Open": "dots1 solar_open",
    "ERNIE 4.5": "ernie4_5 ernie4_5_moe",
    "EXAONE 4": "exaone4 exaone_moe",
    "Gemma 1 to 3": "gemma gemma2 gemma3_text vaultgemma",
    "Gemma 3n, Gemma 4": "gemma3n_text gemma4_text",
    "GLM 4": "glm glm4 glm4_moe",
    "GPT-2, GPT-J, GPT-NeoX": "gpt2 gpt_bigcode gptj gpt_neox",
    "gpt-oss": "gpt_oss",
    "Granite": "granite granite_swa granitemoe",
    "Helium, Jais 2": "helium jais2",
    "Hunyuan": "hunyuan_v1_dense hunyuan_v1_moe",
    "InternLM3": "internlm3",
    "Llama": "llama",
    "Llama 4": "llama4_text",
    "MiniMax M2": "minimax_m2",
    "Mistral, Ministral, Mixtral": "mistral ministral ministral3 mixtral",
    "OLMo 1 to 3": "olmo olmo2 olmo3 olmoe flex_olmo",
    "OPT": "opt",
    "Phi 1 to 3": "phi phi3 phimoe",
    "Qwen 2 and 3": "qwen2 qwen2_moe qwen3 qwen3_moe",
    "Seed-OSS, SmolLM3": "seed_oss smollm3",
    "StarCoder 2": "starcoder2",
}
# MLA: pages hold a latent for each token, not K and V
LATENTS = {
    "A.X K1": "axk1",
    "DeepSeek V2, V3 and R1; Kimi K2": "deepseek_v2 deepseek_v3",
    "GLM 4.7 Flash": "glm4_moe_lite",
    "LongCat Flash": "longcat_flash",
    "MiniCPM 3": "minicpm3",
    "Mistral Small 4": "mistral4",
    "Sarvam": "sarvam_mla",
    "Youtu": "youtu",
}
HYBRIDS = {
    "Bamba, Granite 4 H": "bamba granitemoehybrid",
    "Falcon H1": "falcon_h1",
    "Jamba": "jamba",
    "Kimi Linear (MLA)": "kimi_linear",
    "LARA": "lara_mini",
    "LFM 2 and 3": "lfm2 lfm2_moe lfm3",
    "Ling, Ring (MLA)": "bailing_hybrid",
    "Nemotron H, Nemotron 3": "nemotron_h",
    "OLMo Hybrid": "olmo_hybrid",
    "Qwen3-Next, Qwen3.5": "qwen3_next qwen3_5_text qwen3_5_moe_text",
    "Zamba 1 and 2": "zamba zamba2",
    "ZAYA": "zaya",
}
# only text is served: tokens for images in a prompt are refused
VISION_FAMILIES = {
    "Aya Vision": "aya_vision",
    "Gemma 3": "gemma3",
    "GLM 4V": "glm4v",
    "Idefics 3, SmolVLM": "idefics3 smolvlm",
    "InternVL": "internvl",
    "Kimi K2.5 (MLA)": "kimi_k25",
    "LLaVA": "llava",
    "Mistral Small 3.1": "mistral3",
    "Qwen-VL 2 to 3": "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe",
}
PROBED = "nemotron"  # refused when their weights have loaded
OTHERS = (
    "biogpt bloom falcon falcon_mamba mamba mamba2 minimax mpt qwen4_exp_text stablelm"
)
INDEXED = "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4"
OTHERS += f" {INDEXED}"
SERVED_FAMILIES = (
    *FAMILIES.values(),
    *LATENTS.values(),
    *HYBRIDS.values(),
    *VISION_FAMILIES.values(),
)
SERVED_KINDS = " ".join(SERVED_FAMILIES).split()
REFUSED_KINDS = f"{PROBED} {OTHERS}".split()
KINDS = [*SERVED_KINDS, *REFUSED_KINDS]
# tried only with the page
MORE_SERVED = " ".join([*families.SERVED.values(), *families.SEEING.values()]).split()
MORE_REFUSED = families.REFUSED.split()
LENGTHS = (5, 37, 70)
ANSWER = 24
SERVED = "served"
WIDTH = 100
VERSION = transformers.__version__
PROMPTS = ", ".join(map(str, LENGTHS))
HEAD = f"""# Models

`disagg models check NAME` shows whether a model can be served and, with `--memory 24GiB`, how many
tokens fit. It reads the config and, if there are weights, the headers of their files: each tensor
has to be one of the model. Chat template, tokenizer and `generation_config.json` are read as
`disagg serve` reads them. A few properties can be probed only when the weights load, so a model
that passes may still be refused then. Code in a model's repository is never run: if transformers
knows the type of the model, its own class is used, otherwise the model is refused.

Each architecture below was tested as a small random model with transformers {VERSION}: greedy
tokens on exact pages (codec `raw`) against transformers' own `generate`, for prompts of {PROMPTS}
tokens with {ANSWER} generated tokens each. This page is written by
`python -m tests.model.architectures --out docs/models.md`.

## Not served

| architecture | reason |
|---|---|
"""
OTHER = """
transformers can generate text with some other architectures that are not decoder-only language
models: encoders, encoder-decoders, draft models, diffusion models. They are not served:

{no_decoders}

These could not be tried: no small model of them could be made, or it does not answer to text
alone. Their configs are read like all others, and the probe at load decides:

{untried}
"""
MIDDLE = """
## Served

These give exactly the tokens of `generate`, including mixtures of experts and sliding windows.

| family | architectures (`model_type`) |
|---|---|
"""
LATENT = """
## Latents (MLA)

A layer of multi-head latent attention keeps one latent and one rotated key for each token, from
which K and V of all heads follow. Pages hold just these: one KV head whose first channels are V
too, so V is not stored. Prefill expands them to K and V of all heads, one layer at a time; decoding
attends to them directly. These models need transformers 5.24 or later.

| family | architectures (`model_type`) |
|---|---|
"""
LATENT_NOTES = """
- Not every codec can hold latents; `disagg models check` names those that can, and
  [Codecs](codecs.md#latents) has their quality. Latents are far smaller than K and V of all heads:
  70,272 bytes a token instead of 5 MB for DeepSeek-V3 in 16 bits. All compression ratios relate to
  latents in 16 bits.
- Models with an indexer (DSA: DeepSeek V3.2, GLM-5 and others) attend only to the tokens that the
  indexer picks, and keep a key of it for each token. They are refused.
- Kimi K2 names its type `kimi_k2` and brings code of its own. It is DeepSeek V3, and is served as
  such. Mistral Small 4 comes as `mistral3` with a language model of type `mistral4`.
- While a prompt is computed, K and V of all heads of one layer need memory besides the latents:
  3 GB for 32,768 tokens of DeepSeek-V3. Each chunk of a prompt expands the latents before it again,
  so a larger `engine.max_batch_tokens` computes long prompts faster.
- Latents have not been tried on a GPU. Their kernels are for H100 and H200 only; on other GPUs
  torch computes their attention, which is much slower.
"""
HYBRID = """
## Hybrids

In hybrid models some layers keep a state of fixed size instead of K and V: state spaces, linear
attention, short convolutions. They need transformers 5.24 or later. The hand-off sends the state
too, as one record per layer. Codecs apply only to layers with K and V. A codec plan numbers these
in the order in which the model calls them: layer 0 is the first layer that attends.

| family | architectures (`model_type`) |
|---|---|
"""
VISION = """
## Served for text only

These models also see images. They are loaded whole, with the weights of their vision part, and
their answers to text are those of `generate`. A prompt with one of their tokens for images, videos
or sound is refused by name.

| family | architectures (`model_type`) |
|---|---|
"""
HYBRID_NOTES = """
- States are large. `disagg models check` shows their bytes for one sequence, stored and sent, and
  how many tokens of KV take as much. Steps compute with exact states, most often in fp32. The
  setting `state` rounds them once, when a prompt is computed: to `bf16` (half of the bytes), or to
  `int8` with a scale for each row and column (a quarter). By default they are `int8`, and exact
  with codec `raw`. [Codecs](codecs.md#states-of-hybrid-models) shows the cost.
- A sequence that moves in the middle of its answer sends its states as they are: rounded again,
  they would change the answer. So a move sends 2 to 4 times the state bytes of a prompt.
- A prefix is computed once, as for other models, but a prompt resumes only where a worker has a
  snapshot of the states: near the end of an earlier prompt (so the next turn of a chat computes
  only what is new), every 4,096 tokens, and where two earlier prompts parted. A snapshot is as
  large as the states of a sequence; all of them fill at most `engine.snapshot_share` of the arena,
  and give way to sequences. A decode worker caches pages of prefixes as usual and does not receive
  them again, but it always receives the states.
- Their sequences have no drafts of look-up speculation: a state cannot be taken back.
- Mamba 1 (`jamba`, `zamba`): transformers cannot continue from a state with several tokens at once.
  So these layers compute replays, and all chunks of a prompt after the first, token by token. Set
  `engine.max_batch_tokens` above the length of your prompts to compute them in one chunk. Going on
  from a snapshot would take longer than the whole prompt, so no snapshots are taken of them.
- Without the packages `flash-linear-attention`, `causal-conv1d` and `mamba-ssm`, transformers
  computes these layers with plain torch, which is correct, but slow for long prompts. Hybrids have
  not been tried on a GPU.
"""
FOOT = """
## Quantized weights

Quantized weights are unpacked to the model's dtype while they load, one weight at a time, on any
device. They then take the memory of that dtype, which `disagg models check` shows. Activations are
not quantized. On a CPU, [`model.weights`](operations.md#cpu-workers) rounds weights to 8 or 4 bits
again.

| written by | formats |
|---|---|
| DeepSeek, Qwen and others (`fp8`) | FP8 with a scale per tensor, channel or square |
| FBGEMM (`fbgemm_fp8`) | FP8 with a scale per channel |
| NVIDIA's ModelOpt (`modelopt`, `hf_quant_config.json`) | FP8, as above; NVFP4; both mixed |
| `compressed-tensors` | FP8, int2, int4, int8, NVFP4, MXFP4 |
| AutoAWQ (`awq`) | int4, layout `gemm` |
| GPTQ (`gptq`) | 2, 4 and 8 bits, also with `desc_act`; layouts `gptq` and `gptq_v2` |
| gpt-oss (`mxfp4`) | experts in MXFP4 |

Other formats, such as bitsandbytes, HQQ, AQLM, Marlin and sparse ones, are refused by name before
workers start. So are weights with a part that is missing, unknown or of another shape. Tensors
that serving does not need are left out: scales of activations and of KV caches, layers that draft
tokens, and parts for images or sound that the served class does not have.

Each format was tested with a small model: its weights and greedy tokens are those of the same model
unpacked independently. On a GPU, transformers has kernels that multiply some formats without
unpacking them. They are used if their package is installed, which was not tested: `kernels` for
`mxfp4` (compute capability 7.5 or higher) and `fp8` (8.9), `gptqmodel` for `awq` and `gptq` (7.5).
`kernels` downloads its code from the Hugging Face Hub when such a model is first loaded.

## Notes

- Soft-capping (`gemma2`, `vaultgemma`) and attention sinks (`gpt_oss`) work in every decode kernel.
  Prefill of these models uses unfused attention and is slower.
- `gpt_oss` was tested in fp32, also with experts in MXFP4, as in its real checkpoints.
- `gpt_oss` writes its thoughts and its answer in channels, which chat completions and responses
  tell apart: [Agents](agents.md#thoughts).
- Gemma 4 and Gemma 3n: layers may differ in heads and head dim, and some attend to the K and V of
  an earlier layer. Codec plans number the layers that have K and V. A codec spec with alternatives,
  `a|b`, chooses for each head dim.
- Llama 4 attends in chunks in most layers: a query sees its chunk of 8,192 tokens up to itself.
  Pages before a chunk are dropped when it begins.
- `gemma3n`, the class that also sees and hears, needs the package `timm`.

## Context, dtype, end tokens and sampling

- `model.context` sets how many tokens a prompt and its answer may have together, as vLLM's
  `--max-model-len` does. A shorter context saves memory. A longer one is possible as far as the
  model's rope scaling reaches: with llama3 and linear scaling, up to `factor` times the original
  length. With YaRN that length is already the default. `disagg models check` prints the default
  and the limit.
- LongRoPE (Phi-3, Phi-4-mini) has two sets of frequencies: short factors for texts up to the
  original length, long ones for all tokens of a longer text. A prompt beyond that length begins
  with the long ones. A text that grows past it while it is answered is computed again, once, with
  prompt and answer; so does transformers for Phi 3. For other architectures, transformers keeps the
  older keys, so an answer may differ from its own beyond that point.
- Dynamic scaling changes its frequencies with the length of a text. By default the context ends
  before they change. With a longer `model.context`, every text gets the frequencies of that length,
  which may cost short texts some quality.
- `model.dtype: auto` on a GPU is the dtype that `config.json` or its `text_config` names, or else
  the dtype of most of the weights. A CPU with bf16 units takes bfloat16 for models that are stored
  in it, from 100 MB of weights on; otherwise a CPU takes float32.
- An answer ends at any end token of `generation_config.json`, `config.json` and the tokenizer. Some
  tools write an architecture's default ids into `config.json`. So an id that only this file names
  is ignored if it is an ordinary word of the vocabulary.
- `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty` and, for chats, `max_new_tokens` in
  `generation_config.json` are the defaults for requests that do not set them. `do_sample: false`
  means temperature 0, as in transformers; vLLM ignores that key. `disagg serve` prints these
  defaults and `/v1/models` lists them. `model.generation_config: none` ignores the file; a path
  names another one.
"""


def table() -> str:
    """The whole page."""
    refused = [
        f"| `{kind}` | {outcome_of(kind)} |\n"
        for kind in progress([*REFUSED_KINDS, *MORE_REFUSED], str)
    ]
    served = rows_of(FAMILIES | families.SERVED)
    latents = rows_of(LATENTS)
    hybrids = rows_of(HYBRIDS)
    seeing = rows_of(VISION_FAMILIES | families.SEEING)
    page = [HEAD, *refused, others(), MIDDLE, served, LATENT, latents, LATENT_NOTES]
    page += [HYBRID, hybrids, HYBRID_NOTES]
    return "".join([*page, VISION, seeing, FOOT])


def others() -> str:
    """What the page says of architectures of which no small model was served."""
    return OTHER.format(
        no_decoders=listed(families.NO_DECODERS), untried=listed(families.UNTRIED)
    )


def listed(kinds: str) -> str:
    """A sentence of names, in lines of the page."""
    names = ", ".join(f"`{kind}`" for kind in kinds.split())
    return textwrap.fill(f"{names}.", WIDTH, break_on_hyphens=False)


def _by_name(row: tuple[str, str]) -> str:
    return row[0].casefold()


def rows_of(by_family: Mapping[str, str]) -> str:
    """A line for each family, all of whose architectures must be served."""
    lines = []
    for family, kinds in progress(sorted(by_family.items(), key=_by_name), str):
        for kind in kinds.split():
            assert outcome_of(kind) == SERVED, kind
        names = ", ".join(f"`{kind}`" for kind in kinds.split())
        lines.append(f"| {family} | {names} |\n")
    return "".join(lines)


def outcome_of(kind: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return try_out(kind, Path(folder))


def try_out(kind: str, folder: Path) -> str:
    """SERVED if a small model answers as `generate` does; else the reason of the refusal."""
    try:
        describe_model(str(save_config(kind, folder)))
        path = str(save_tiny(kind, folder))
        runner = Runner.load(path)
    except ModelError as error:
        return " ".join(str(error).split())
    prompts = [random_prompt(n) for n in LENGTHS]
    reference = ReferenceModel(path)
    expected = [reference.generate(prompt, ANSWER) for prompt in prompts]
    tokens = {token for answer in expected for token in answer.tokens}
    assert len(tokens) > 5, "answers of one token would prove little"
    engine = make_engine(runner, max_batch_tokens=29)
    engine.arena.fill_(0xFF)  # records that come as they are hold NaN
    answers = serve(engine, prompts, "raw", ANSWER)
    for answer, right in zip(answers, expected, strict=True):
        assert_same(answer, right)
    return SERVED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="where the page is written"
    )
    parser.parse_args().out.write_text(table())


if __name__ == "__main__":
    main()
