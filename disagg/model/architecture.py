"""A model's config and class in transformers. Code in a model's repository is never run.

Importing transformers takes seconds, so it is imported by the functions that need it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from disagg.errors import ModelError
from disagg.model.json_file import read_object

# types of models that transformers knows by another name, which their own code repeats
SAME_AS = {"kimi_k2": "deepseek_v3"}
_BUILDING = RLock()


def read_architecture(path: Path) -> Any:
    """The config of a model folder as transformers reads it, with the defaults of its class.

    ModelError for a type that transformers does not know, and for a config that it refuses.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    config = read_object(path / "config.json")
    kind = config.get("model_type")
    try:
        if kind in SAME_AS:
            known = SAME_AS[kind]
            return CONFIG_MAPPING[known].from_dict(config | {"model_type": known})
        if kind is not None and kind not in CONFIG_MAPPING:
            raise ModelError(f"transformers {__version__} has no model type {kind!r}")
        return AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except ModelError:
        raise
    except Exception as error:  # its checks of a config raise anything
        reason = " ".join(str(error).split())
        raise ModelError(
            f"transformers cannot read {path / 'config.json'}: {reason}"
        ) from error


def language_model(config: Any) -> tuple[Any, Any]:
    """The class of transformers that generates text for a config, and the config of that class.

    That is the whole config, or, if the class is only the language model of a model with several
    parts, its text part. ModelError if there is no such class.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        __version__,
    )

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        model = auto._model_mapping.get(type(config), None)
        if model is not None:
            is_whole = isinstance(config, model.config_class)
            return model, config if is_whole else config.get_text_config()
    raise ModelError(
        f"transformers {__version__} has no language model for {config.model_type!r}"
    )


@contextmanager
def building() -> Iterator[None]:
    """Build a model of transformers: one at a time in a process, with no progress bar or report.

    While it builds, transformers replaces methods of its classes, such as `tie_weights`. Two
    threads that do so at once would leave a replacement behind, and spoil every later model.
    """
    from transformers.utils import logging

    with _BUILDING:
        logging.disable_progress_bar()
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
