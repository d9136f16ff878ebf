"""The JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from disagg.errors import ModelError


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file; ModelError for any other content."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}; expected an object")
    return content
