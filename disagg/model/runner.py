"""The runner: a Hugging Face decoder-only model that prefills exactly and decodes on pages.

One forward pass is one packed row of tokens: chunks of prompts, single decoding tokens and blocks
of a replay side by side. Any model that calls transformers' AttentionInterface will do.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from disagg.config import DEVICES
from disagg.errors import ConfigError
from disagg.model.architecture import building
from disagg.model.attention import IMPLEMENTATION, Attention, Batch, BatchAttention
from disagg.model.cache import Workspace
from disagg.model.capacity import class_of, kv_shape
from disagg.model.describe import ModelInfo, describe_model
from disagg.model.forward import ModuleForward, forward_of
from disagg.model.graphs import CudaRecorder, DecodeGraphs, GroupRecorder, Recorder
from disagg.model.latents import keep_latents
from disagg.model.linear import PROMPT_ROWS
from disagg.model.llama import LlamaForward
from disagg.model.longrope import LongRows, long_rows, split_rotary
from disagg.model.outliers import KeyOutliers
from disagg.model.probe import check_attention
from disagg.model.quantized_linear import check_weights_setting, quantized_part
from disagg.model.rank_group import RankGroup
from disagg.model.shards import local_info
from disagg.model.states.cache import StepCache
from disagg.model.states.layers import continues_everywhere, split_states
from disagg.model.static import StaticStep
from disagg.model.weights import fingerprint_model, fingerprint_with, load_model
from disagg.paged.page_tables import upload


def pick_device(device: str) -> str:
    """The device to use, "cpu" or "cuda"; "auto" takes a GPU where torch sees one.

    ConfigError for an unknown device, and for a GPU that is not there.
    """
    if device not in DEVICES:
        raise ConfigError(f"device {device!r} is unknown; known: {', '.join(DEVICES)}")
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError(
            "device 'cuda' is set, but torch finds no GPU here; 'auto' takes a CPU"
        )
    if device == "auto":
        return "cuda" if has_gpu else "cpu"
    return device


def has_bfloat16() -> bool:
    """Whether the GPU computes in bfloat16 itself, without emulation in fp32."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def fix_rotary(model: nn.Module, context: int) -> bool:
    """Make rotary embeddings independent of the last position: reading it stalls a GPU every step.

    Frequencies that depend on the length of the text become those of a text as long as the context.
    True if they then differ from those of short texts.
    """
    is_changed = False
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            is_changed |= _fix_frequencies(module, rope_type, context)
            setattr(module, "rope_type", "default")  # noqa: B010 (no attribute of nn.Module)
        elif isinstance(rope_type, dict):  # one for each type of layer
            for layer_type, each in rope_type.items():
                is_changed |= _fix_frequencies(module, each, context, layer_type)
            defaults = dict.fromkeys(rope_type, "default")
            setattr(module, "rope_type", defaults)  # noqa: B010
    return is_changed


def _fix_frequencies(
    module: Any, rope_type: str, context: int, layer_type: str | None = None
) -> bool:
    """Set the frequencies that depend on the length of the text; True if that changed them."""
    if "dynamic" not in rope_type:
        return False
    name = f"{layer_type}_inv_freq" if layer_type else "inv_freq"
    frequencies = getattr(module, name)
    fixed, _ = ROPE_INIT_FUNCTIONS[rope_type](
        module.config, frequencies.device, seq_len=context, layer_type=layer_type
    )
    is_changed = not torch.equal(fixed, frequencies)
    frequencies.copy_(fixed)
    return is_changed


class Runner:
    """A loaded model. Not thread-safe: one thread runs forward passes."""

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        fingerprint: str,
        workers: int = 1,
        forward: ModuleForward | LlamaForward | None = None,
        weights: str | None = None,
        group: RankGroup | None = None,
    ):
        """
        info:    of what this rank has of it
        workers: processes of this host that load the model
        weights: as of `ModelConfig`
        forward: computes with the weights of `model`; None: the fastest that there is
        group:   the ranks that divide the model; None: this one has all of it
        """
        self.info = info
        self.group = group
        # packed weights, which may be the model's first ones, are on no device
        self.device = model.get_input_embeddings().weight.device
        self.shape = kv_shape(info)
        self.continues_chunks = continues_everywhere(model)
        self._long_rows = LongRows()
        if info.rope_switch is not None:
            split_rotary(model, self._long_rows)
        if fix_rotary(model, info.context_length):
            # workers with other contexts would compute other keys
            fingerprint = fingerprint_with(fingerprint, info.context_length)
        self.weights = "as stored"  # in words
        with torch.inference_mode():
            self._forward = forward or forward_of(model, workers, weights, group)
        if weights is not None:
            # so would workers with other weights
            self.weights = f"{weights} in {quantized_part(self._forward)}"
            fingerprint = fingerprint_with(fingerprint, self.weights)
        self.fingerprint = fingerprint
        self.key_outliers: KeyOutliers | None = None  # for evaluation
        # None: steps are not recorded, and kernels are not compiled
        self.graphs: DecodeGraphs | None = None
        if self.device.type == "cuda":
            # cuDNN plans anew for each length of prompts
            torch.backends.cuda.enable_cudnn_sdp(False)
            self.record_steps(CudaRecorder())

    @property
    def _pads_chunks(self) -> bool:
        is_cpu = self.device.type == "cpu"
        return is_cpu and self.info.dtype == "float32" and not self.info.states

    @property
    def has_pieces(self) -> bool:
        """Whether layers with a state go on at fixed tokens, as of `PIECE_TOKENS`."""
        is_cpu = self.device.type == "cpu"
        return is_cpu and bool(self.info.states) and self.continues_chunks

    @classmethod
    def load(
        cls,
        ref: str | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        context: int | None = None,
        workers: int = 1,
        weights: str | None = None,
        group: RankGroup | None = None,
    ) -> "Runner":
        """Load a model by name in the local cache, by path, or the packaged one.

        dtype:   "auto" (as of `ModelConfig`, or float16 where a GPU has no bfloat16), "float32",
                 "bfloat16", "float16"
        context: maximum tokens of a prompt with its answer; None: the default of the model
        workers: processes of this host that load it
        weights: as of `ModelConfig`
        group:   the ranks that divide it, each of which loads its part at the same time
        ModelError if there is none, or if its attention is not plain softmax attention; ConfigError
        for a device that `pick_device` refuses, for a context that is too long, and for weights
        that this host cannot round to.
        """
        device = pick_device(device)
        if device == "cuda":
            # an earlier model has reference cycles, which keep its memory
            gc.collect()
            torch.cuda.empty_cache()
        info = describe_model(ref, dtype, device, context)
        if dtype == "auto" and info.dtype == "bfloat16" and not has_bfloat16():
            info = describe_model(ref, "float16", device, context)
        check_weights_setting(weights, device, info.dtype)
        if group is not None and weights is not None:
            raise ConfigError(
                f"config key model.weights is {weights!r} with {group.ranks} ranks, which would "
                "round their parts of a row apart; expected none, or one rank"
            )
        model = load_model(info, device, group).eval().requires_grad_(False)
        if group is not None:
            info = local_info(info, group.ranks, group.rank)
        split_states(model, info.states)
        keep_latents(model, info.layers)
        with torch.inference_mode():
            check_attention(model, info)
        is_first = group is None or group.rank == 0  # nobody asks the others
        fingerprint = fingerprint_model(info.path) if is_first else ""
        runner = cls(model, info, fingerprint, workers, weights=weights, group=group)
        if group is not None and runner.graphs is None:
            group.begin_serving()
        return runner

    @classmethod
    def random(
        cls,
        folder: str,
        dtype: str = "auto",
        device: str = "cpu",
        weights: str | None = None,
    ) -> "Runner":
        """A model with random weights, of the sizes in a folder's config.json: for timing."""
        info = describe_model(folder, dtype, device)
        kind, config = class_of(info)
        with building(), torch.device(device):
            model = kind._from_config(
                config,
                dtype=getattr(torch, info.dtype),
                attn_implementation=IMPLEMENTATION,
            )
        split_states(model.eval().requires_grad_(False), info.states)
        keep_latents(model, info.layers)
        return cls(model, info, "random", weights=weights)

    def record_steps(self, recorder: Recorder) -> DecodeGraphs:
        """Record decode steps from now on, and replay equal ones; as all ranks of the group."""
        if self.group is None:
            self.graphs = DecodeGraphs(self._static_step, recorder)
        else:
            of_group = GroupRecorder(recorder, self.group, self.device)
            together = of_group.together
            self.graphs = DecodeGraphs(self._static_step, of_group, together)
        return self.graphs

    def leave_group(self) -> None:
        """The end of the group: let go of recorded steps, then of the other ranks."""
        if self.group is None:
            return
        if self.graphs is not None:
            self.graphs.clear()
        self.group.leave()

    def workspace(self, total: int, rooms: Sequence[int] = ()) -> Workspace:
        """Room for the exact K and V of a prompt of `total` tokens while it prefills."""
        return Workspace(self.info.layers, total, rooms)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Run one packed row; K and V go to sinks and pages. Logits [len(outputs), V] fp32.

        A decode step like an earlier one is replayed where steps are recorded: on a GPU.
        """
        logits = self._compute(self.prepare(batch))
        if self.group is not None:
            self.group.finish(self.device)
        return logits

    def prepare(self, batch: Batch) -> Batch:
        """A batch that says all that a forward pass depends on: then all ranks do the same.

        In float32 on a CPU, steps with a chunk of a prompt get `PROMPT_ROWS` rows, as fewer round
        otherwise. In bfloat16 any number of rows may.
        """
        if not batch.long_rows:
            batch = replace(batch, long_rows=self._long_by_position(batch))
        if batch.chunks and self._pads_chunks:
            batch = batch.with_rows(PROMPT_ROWS)
        if self.graphs is not None and batch.recordings is None:
            batch = replace(batch, recordings=self.graphs.choose(batch))
        return batch

    def _compute(self, batch: Batch) -> Tensor:
        if self.graphs is not None:
            logits = self.graphs.run(batch)
            if logits is not None:
                return logits
        inputs = (
            torch.tensor([batch.tokens], dtype=torch.int32),
            torch.tensor([batch.positions], dtype=torch.int32),
            torch.tensor(batch.outputs, dtype=torch.int32),
            torch.tensor(batch.long_rows, dtype=torch.int32),
            tuple(decode.step for decode in batch.decodes),
            tuple(chunk.tables for chunk in batch.chunks),
            batch.states.tables,
        )
        tokens, positions, outputs, is_long, steps, tables, states = upload(
            inputs, self.device
        )
        self._long_rows.set(is_long)
        decodes = [
            replace(decode, step=step)
            for decode, step in zip(batch.decodes, steps, strict=True)
        ]
        chunks = [
            replace(chunk, tables=chunk_tables)
            for chunk, chunk_tables in zip(batch.chunks, tables, strict=True)
        ]
        batch = replace(
            batch,
            decodes=tuple(decodes),
            chunks=tuple(chunks),
            states=batch.states.with_tables(states),
        )
        logits = self._logits(tokens, positions, batch, outputs.long()).float()
        self._compare_largest(batch)
        return logits

    def _compare_largest(self, batch: Batch) -> None:
        """Let each rank know the largest K and V of all heads of prompts that are complete."""
        if self.group is None:
            return
        for chunk in batch.chunks:
            if chunk.before + chunk.count == chunk.workspace.total:
                chunk.workspace.update_largest(self.group.max)

    def _static_step(self, static: StaticStep) -> Tensor:
        """Logits [bucket, V] of every row of a step in its buffers; never waits for the host."""
        self._long_rows.set(static.is_long)
        return self._logits(static.tokens, static.positions, static.batch)

    def _long_by_position(self, batch: Batch) -> Sequence[bool]:
        """Which rows belong to long texts, by what a batch says of them."""
        switch = self.info.rope_switch
        if switch is None:
            return [False] * len(batch.tokens)
        prompts = [
            (slice(chunk.row, chunk.row + chunk.count), chunk.workspace.total)
            for chunk in batch.chunks
        ]
        return long_rows(batch.positions, prompts, switch)

    def _logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: Batch,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The model's logits for tokens and positions [1, N]: [N, V], or those of some rows."""
        attend: Attention = BatchAttention(
            batch, self.info.layers, self.info.sources
        ).attend
        if self.key_outliers is not None:
            attend = self.key_outliers.around(attend)
        cache = StepCache(batch.states, batch.arena, positions)
        return self._forward(tokens[0].long(), positions[0].long(), attend, cache, rows)
