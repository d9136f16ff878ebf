"""The share of a rank in a model: its heads, and its part of every linear layer around them.

    q, k, v, gate, up   "colwise": a rank has part of the outputs
    o, down             "rowwise": it has part of the inputs; the ranks' outputs are summed
    head                it has part of the vocabulary; the logits are gathered
    all else            each rank has all of it

transformers' plan of the model names these layers but the head. Of them each rank reads only its
own slices of the files. It reads the whole head and keeps its part.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from disagg.errors import ModelError
from disagg.model.describe import ModelInfo
from disagg.model.rank_group import RankGroup

COLWISE, ROWWISE, REPLICATED = "colwise", "rowwise", "replicated_with_grad_allreduce"
# sizes in a config that are divided
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")

Plan = Mapping[str, str]  # the style of each pattern of names


def check_ranks(config: PreTrainedConfig, info: ModelInfo, ranks: int) -> None:
    """ModelError unless a model can be divided between so many ranks.

    config: of the model's class
    """
    if ranks == 1:
        return
    name = info.architecture
    reason = _objection(config, info)
    if reason:
        raise ModelError(f"{name} {reason}, so it runs on one rank; ranks are {ranks}")
    heads = info.layers[0].heads
    sizes = {"KV heads": heads, "query heads": info.query_heads}
    sizes["channels in its MLP"] = config.intermediate_size
    for what, size in sizes.items():
        if size % ranks:
            raise ModelError(
                f"{name} has {size} {what}, which {ranks} ranks cannot share equally; "
                f"ranks may be a divisor of {heads}"
            )


def _objection(config: PreTrainedConfig, info: ModelInfo) -> str:
    """Why a model cannot be divided at all; "" if it can."""
    plan = plan_of(config)
    if info.states:
        return "has layers with a state"
    if any(layer.latent is not None for layer in info.layers):
        return "has latent attention"
    if len({layer.heads for layer in info.layers}) > 1:
        return "has layers with different numbers of KV heads"
    if not any(key.endswith("self_attn.o_proj") for key in plan):
        return "has no plan for tensor parallelism in transformers"
    others = sorted({*plan.values()} - {COLWISE, ROWWISE, REPLICATED})
    if others:
        return f"has layers that are divided as {', '.join(others)}, which is not built"
    return ""


def plan_of(config: PreTrainedConfig) -> Plan:
    """transformers' plan of a model's layers: the style of each pattern of names."""
    plan = dict(config.base_model_tp_plan or {})
    return {key: style for key, style in plan.items() if key.startswith("layers.")}


def local_config(config: PreTrainedConfig, info: ModelInfo, ranks: int) -> Any:
    """The config of the model that one rank has."""
    config = deepcopy(config)
    config.head_dim = info.layers[0].head_dim
    for name in DIVIDED:
        setattr(config, name, getattr(config, name) // ranks)
    return config


def local_info(info: ModelInfo, ranks: int, rank: int = 0) -> ModelInfo:
    """The sizes of what one rank has of a model, and which of its heads they are."""
    layers = []
    for layer in info.layers:
        heads = layer.heads // ranks
        layers.append(replace(layer, heads=heads, first_head=rank * heads))
    query_heads = info.query_heads // ranks
    return replace(info, layers=tuple(layers), query_heads=query_heads)


class ShardSlice:
    """The slice of a weight that one rank has, as transformers reads slices of files.

    dim: which dimension is divided
    """

    def __init__(self, stored: Any, dim: int, rank: int, ranks: int):
        self._stored = stored
        self._dim = dim
        self._rank = rank
        self._ranks = ranks

    def __getitem__(self, _: object) -> Tensor:
        if not hasattr(self._stored, "get_shape"):  # a packed weight
            whole = self._stored[...]
            return whole.chunk(self._ranks, self._dim)[self._rank].contiguous()
        size = self._stored.get_shape()[self._dim] // self._ranks
        part = slice(self._rank * size, (self._rank + 1) * size)
        tensor: Tensor = self._stored[part] if self._dim == 0 else self._stored[:, part]
        return tensor.contiguous()


def shard_tensors(
    tensors: Mapping[str, Any], plan: Plan, rank: int, ranks: int
) -> dict[str, Any]:
    """The weights of a model as one rank has them; none is read yet."""
    shards = dict(tensors)
    for name, stored in tensors.items():
        layer, _, kind = name.rpartition(".")
        style = _style(layer, plan)
        if style == COLWISE:
            shards[name] = ShardSlice(stored, 0, rank, ranks)
        elif style == ROWWISE and kind == "weight":
            shards[name] = ShardSlice(stored, 1, rank, ranks)
    return shards


def _style(layer: str, plan: Plan) -> str | None:
    for pattern, style in plan.items():
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        if re.search(rf"(^|\.){expression}$", layer):
            return style
    return None


class Summed(nn.Module):
    """A linear layer whose inputs are divided between ranks: their outputs are summed."""

    def __init__(self, linear: nn.Linear, group: RankGroup):
        super().__init__()
        self.linear = linear
        self._group = group
        if linear.bias is not None and group.rank > 0:  # rank 0 adds it
            zeros = torch.zeros_like(linear.bias)
            linear.bias = nn.Parameter(zeros, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._group.sum(self.linear(x).contiguous())


class GatheredHead(nn.Module):
    """The head of a model whose vocabulary is divided between ranks: logits are gathered."""

    def __init__(self, head: nn.Linear, group: RankGroup, is_tied: bool):
        """is_tied: the head's weight is that of the embedding, which each rank keeps whole"""
        super().__init__()
        self._group = group
        rows = torch.arange(head.out_features).tensor_split(group.ranks)
        self._widths = [len(part) for part in rows]
        own = slice(
            sum(self._widths[: group.rank]), sum(self._widths[: group.rank + 1])
        )
        width = self._widths[group.rank]
        has_bias = head.bias is not None
        self.linear = nn.Linear(head.in_features, width, bias=has_bias, device="meta")
        for name in ("weight", "bias") if has_bias else ("weight",):
            part = getattr(head, name).data[own]
            if part.is_cuda and not is_tied:
                part = part.clone()  # so that the others can be freed
            setattr(self.linear, name, nn.Parameter(part, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., V]."""
        logits = self.linear(x)
        rows = logits.flatten(0, -2)
        gathered = self._group.gather_columns(rows, self._widths)
        return gathered.unflatten(0, logits.shape[:-1])


def join_ranks(model: PreTrainedModel, plan: Plan, group: RankGroup) -> None:
    """Make the parts of a model one: from now on its forward pass is a collective of all ranks."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if _style(name, plan) == ROWWISE:
            parent, _, attribute = name.rpartition(".")
            setattr(modules[parent], attribute, Summed(module, group))
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    model.lm_head = GatheredHead(model.lm_head, group, is_tied)
