"""A service for one prompt: checked before anything heavy starts, gone afterwards."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from disagg.config import DEFAULT_CODEC, Config
from disagg.engine.sequence import SamplingParams
from disagg.errors import CancelledError
from disagg.model.describe import ModelInfo, describe_model
from disagg.model.tokenizer import Tokenizer
from disagg.server.limits import check_prompt

DEFAULT_GROUP = 64  # channels that share a scale in DEFAULT_CODEC


def check(config: Config, body: Mapping[str, Any]) -> None:
    """What can be known of a request before workers run: sampling, model, length, codec."""
    names = {field.name for field in fields(SamplingParams)}
    SamplingParams(**{k: v for k, v in body.items() if k in names and v is not None})
    info = describe_model(config.model.name, config.model.dtype)
    tokens = Tokenizer.load(config.model.name).encode(body["prompt"])
    check_prompt(len(tokens), info.context_length)
    check_codec(config.codec, info)


def check_codec(spec: str, info: ModelInfo) -> None:
    """ConfigError unless a spec makes a plan for a model.

    Codecs need torch, which takes a second to import: the default is known to be good for heads
    of 64, 128 and so on, so that who asks for nothing special waits for nothing.
    """
    if spec == DEFAULT_CODEC and info.head_dim % DEFAULT_GROUP == 0:
        return
    from disagg.codecs.planning import KVShape, parse_plan

    shape = KVShape(info.num_layers, info.heads, info.head_dim, info.dtype, info.windows)
    parse_plan(spec, shape)


@contextmanager
def private_service(config: Config) -> Iterator[str]:
    """The URL of a service that ends with this block, whatever ends it."""
    config = replace(config, server=replace(config.server, host="127.0.0.1", port=0))
    cluster = config.cluster
    workers = f"{cluster.prefill} prefill and {cluster.decode} decode worker"
    where = "a private Ray" if cluster.address == "local" else f"Ray at {cluster.address}"
    print(f"starting {workers} on {where} ...", file=sys.stderr, flush=True)
    from disagg.server.service import Service

    try:
        with Service(config) as service:
            yield service.url
    except KeyboardInterrupt as error:
        raise CancelledError("cancelled") from error
