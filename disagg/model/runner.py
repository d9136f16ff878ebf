"""The runner: a Hugging Face decoder-only model that prefills exactly and decodes on pages.

One forward pass is one packed row of tokens, whatever it is made of: chunks of prompts, single
decoding tokens, blocks of a replay. Any model that calls transformers' AttentionInterface will do.
"""

import gc
import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from disagg.config import DEVICES
from disagg.errors import ConfigError
from disagg.model.attention import IMPLEMENTATION, Batch, BatchAttention
from disagg.model.cache import Workspace, pass_through
from disagg.model.capacity import kv_shape
from disagg.model.describe import ModelInfo, describe_model
from disagg.model.graphs import CudaRecorder, DecodeGraphs
from disagg.model.linear import pack_linears
from disagg.model.probe import check_attention
from disagg.model.static import StaticStep
from disagg.model.weights import fingerprint_model, load_model
from disagg.paged.page_tables import upload


def pick_device(wanted: str) -> str:
    """The device meant, "cpu" or "cuda"; "auto" takes a GPU where torch sees one.

    ConfigError for an unknown one and for a GPU that is not there.
    """
    if wanted not in DEVICES:
        raise ConfigError(f"device {wanted!r} is unknown; known: {', '.join(DEVICES)}")
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError(
            "device 'cuda' is wanted, and torch sees no GPU here; 'auto' takes a CPU"
        )
    return "cuda" if there and wanted != "cpu" else "cpu"


def has_bfloat16() -> bool:
    """Whether the GPU computes in it, not by way of fp32."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def fix_rotary(model: nn.Module) -> None:
    """Let no rotary embedding look for the last position, for which a GPU would wait in every step:
    contexts end where one would change by it, see `describe_model`."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str | dict):
            fixed = (
                "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")
            )
            setattr(module, "rope_type", fixed)  # noqa: B010 (of no module that is known)


class Runner:
    """A loaded model. Not thread-safe: one thread runs forward passes."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, fingerprint: str):
        self.info = info
        self.fingerprint = fingerprint
        self.device = model.device
        self.shape = kv_shape(info)
        self._model = model
        self._cache = pass_through(model)
        fix_rotary(model)
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.graphs: DecodeGraphs | None = (
            None  # where there are any, kernels are compiled too
        )
        if model.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(
                False
            )  # it plans anew for each length of prompts
            self.record_steps(CudaRecorder())

    @classmethod
    def load(
        cls, ref: str | None = None, dtype: str = "auto", device: str = "cpu"
    ) -> "Runner":
        """Load a model by name in the local cache, by path, or the packaged one.

        dtype: "auto" (float32 on a CPU, else the checkpoint's, or float16 where the chip has no
               bfloat16), "float32", "bfloat16", "float16"
        ModelError if there is none, or if its attention is not plain softmax attention; ConfigError
        as `pick_device` says.
        """
        device = pick_device(device)
        if (
            device == "cuda"
        ):  # a model before this one is in cycles, and its memory is kept
            gc.collect()
            torch.cuda.empty_cache()
        info = describe_model(ref, dtype, device)
        if dtype == "auto" and info.dtype == "bfloat16" and not has_bfloat16():
            info = replace(info, dtype="float16")
        model = load_model(info, device).eval().requires_grad_(False)
        with torch.inference_mode():
            check_attention(model, info)
        pack_linears(model)
        return cls(model, info, fingerprint_model(info.path))

    @classmethod
    def random(cls, folder: str, dtype: str = "auto", device: str = "cpu") -> "Runner":
        """A model of random weights, of the sizes that a folder's config.json says: for timing."""
        info = describe_model(folder, dtype, device)
        config = AutoConfig.from_pretrained(info.path, local_files_only=True)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, info.dtype),
                attn_implementation=IMPLEMENTATION,
            )
        pack_linears(model.eval().requires_grad_(False))
        return cls(model, info, "random")

    def record_steps(self, recorder: CudaRecorder) -> DecodeGraphs:
        """Record decode steps from now on, and replay those that are alike."""
        self.graphs = DecodeGraphs(self._static_step, recorder)
        return self.graphs

    def workspace(self, total: int, rooms: Sequence[int] = ()) -> Workspace:
        """Room for the exact K and V of a prompt of `total` tokens while it prefills."""
        return Workspace(
            self.info.num_layers, self.info.heads, total, self.info.head_dim, rooms
        )

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Run one packed row; K and V go to sinks and pages. Logits [len(outputs), V] fp32.

        A decode step like an earlier one is replayed where steps are recorded: on a GPU.
        """
        if self.graphs is not None and (recorded := self.graphs.run(batch)) is not None:
            return recorded
        given = (
            torch.tensor([batch.tokens], dtype=torch.int32),
            torch.tensor([batch.positions], dtype=torch.int32),
            torch.tensor(batch.outputs, dtype=torch.int32),
            tuple(decode.step for decode in batch.decodes),
            tuple(chunk.tables for chunk in batch.chunks),
        )
        tokens, positions, outputs, steps, tables = upload(given, self.device)
        decodes = [
            replace(x, step=step) for x, step in zip(batch.decodes, steps, strict=True)
        ]
        chunks = [
            replace(x, tables=some)
            for x, some in zip(batch.chunks, tables, strict=True)
        ]
        batch = replace(batch, decodes=tuple(decodes), chunks=tuple(chunks))
        selection = {"logits_to_keep": outputs.long()} if self._selects else {}
        logits = self._logits(tokens, positions, batch, **selection)
        return (logits if self._selects else logits[outputs]).float()

    def _static_step(self, static: StaticStep) -> Tensor:
        """Logits [bucket, V] of every row of a step in its buffers; asks the host for nothing."""
        return self._logits(static.tokens, static.positions, static.batch)

    def _logits(
        self, tokens: Tensor, positions: Tensor, batch: Batch, **selection: Tensor
    ) -> Tensor:
        """What the model makes of tokens and positions [1, N]: [N, V], or the selected rows."""
        return self._model(
            input_ids=tokens.long(),
            position_ids=positions.long(),
            disagg=BatchAttention(batch, self.info.windows).attend,
            **self._cache,
            **selection,
        ).logits[0]
