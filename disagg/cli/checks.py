"""Checks before workers start: model, codecs, sizes, and a whole request.

A wrong value is reported within a second, if possible before torch or Ray is imported.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from disagg.config import DEFAULT_CODEC, ClusterConfig, Config
from disagg.errors import PromptTooLongError, RequestError

if TYPE_CHECKING:
    from disagg.model.describe import ModelInfo
    from disagg.model.tokenizer import Tokenizer
    from disagg.parsers.formats import AnswerFormats

DEFAULT_CODEC_DIM = 16  # the default codec takes heads of any multiple


def check_request(config: Config, body: Mapping[str, Any]) -> None:
    """Raise the error that a service would return for a request."""
    from disagg.model.chat_files import read_template
    from disagg.server.limits import check_answer_length, check_prompt, check_text
    from disagg.server.schema import ChatRequest, CompletionRequest

    info, tokenizer = check_model(config)
    is_chat = "messages" in body
    text = body["messages"][0]["content"] if is_chat else body["prompt"]
    check_text(len(text), info.context_length, tokenizer.longest_token, "prompt")
    num_tokens = len(tokenizer.encode(text))
    check_prompt(num_tokens, info.context_length)
    schema = ChatRequest if is_chat else CompletionRequest
    request = schema.read(json.dumps(body).encode())
    check_answer_length(
        request.max_answer_tokens,
        request.least_answer_tokens,
        num_tokens,
        info.context_length,
    )
    template = read_template(config.model.name, config.server.chat_template)
    if is_chat and template is None:
        raise RequestError(f"{info.path.name!r} has no chat template; leave out --chat")


def check_model(config: Config) -> "tuple[ModelInfo, Tokenizer]":
    """Description and tokenizer of the model; ConfigError for a codec that does not fit it."""
    from disagg.engine.sampling_defaults import read_sampling_defaults
    from disagg.model.describe import check_weights
    from disagg.model.quantization import has_packed_tensors, read_quantization
    from disagg.model.tokenizer import Tokenizer

    model = config.model
    info = check_codecs(model.name, config.listed, model.dtype, context=model.context)
    quantization = read_quantization(info.path)
    is_local = config.cluster.address == ClusterConfig.address
    if is_local:  # on a cluster, weights and devices are those of other hosts
        check_weights(info.path)
        if quantization is not None or has_packed_tensors(info.path):
            from disagg.model.storage import read_storage

            read_storage(info.path)
        if model.device == "cuda" or model.weights is not None:
            from disagg.model.capacity import layers_of
            from disagg.model.quantized_linear import (
                check_layer_sizes,
                check_weights_setting,
            )
            from disagg.model.runner import pick_device

            device = pick_device(model.device)
            check_weights_setting(model.weights, device, info.dtype)
            if model.weights is not None:
                check_layer_sizes(layers_of(info), model.weights)
    # these raise for files and names that cannot be used
    read_answer_formats(config)
    read_sampling_defaults(model.name, model.generation_config)
    check_arena(config, info)
    return info, Tokenizer.load(config.model.name)


def read_answer_formats(config: Config) -> "AnswerFormats":
    """The formats of the model's calls and thoughts; UnknownNameError for an unknown parser."""
    from disagg.model.chat_files import read_template
    from disagg.parsers.formats import AnswerFormats

    server = config.server
    template = read_template(config.model.name, server.chat_template)
    text = "" if template is None else template.text
    return AnswerFormats.choose(text, server.tool_parser, server.reasoning_parser)


def check_codecs(
    model: str | None,
    specs: Iterable[str],
    dtype: str = "auto",
    tokens: int = 0,
    context: int | None = None,
) -> "ModelInfo":
    """The description of a model.

    tokens:  length of a prompt with its answer; PromptTooLongError if it exceeds the context
    context: as of `describe_model`
    Raises ConfigError for a spec that makes no plan for the model.
    """
    from disagg.model.describe import describe_model

    info = describe_model(model, dtype, context=context)
    if tokens > info.context_length:
        raise PromptTooLongError(
            f"{tokens:,} tokens of a prompt and its answer are too many; "
            f"the model's context holds at most {info.context_length:,}"
        )
    for spec in specs:
        check_codec(spec, info)
    return info


def check_codec(spec: str, info: "ModelInfo") -> None:
    """ConfigError unless a spec makes a plan for a model.

    Codecs need torch, which takes a second to import. The default is known to fit heads of whole
    16 channels, so the common case does not wait.
    """
    has_whole_units = all(x.head_dim % DEFAULT_CODEC_DIM == 0 for x in info.layers)
    if spec == DEFAULT_CODEC and has_whole_units:
        return
    from disagg.codecs.planning import parse_plan
    from disagg.model.capacity import kv_shape

    parse_plan(spec, kv_shape(info))


def check_arena(config: Config, info: "ModelInfo") -> None:
    """ConfigError where the codecs need a larger arena than the configured one."""
    if config.engine.arena_bytes is None:
        return
    from disagg.codecs.planning import parse_plan
    from disagg.engine.arena import check_slabs
    from disagg.model.capacity import kv_shape, slab_bytes_for

    arena_bytes = config.engine.arena_bytes
    shape = kv_shape(info, config.state)
    plans = [parse_plan(spec, shape) for spec in config.listed]
    slab_bytes = slab_bytes_for(shape, plans, arena_bytes, info.context_length)
    check_slabs(arena_bytes, slab_bytes, plans, info.context_length)
