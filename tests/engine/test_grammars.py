"""Answers follow their grammars, which are pure functions of the tokens so far."""

import json
from typing import Any

import jsonschema
import pytest
import torch

from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill
from disagg.grammar import constraints
from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer
from tests.engine.serving import answers, make_engine, request, run_until_idle, serve
from tests.model.tiny import random_prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
