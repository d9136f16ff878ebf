"""The log of every process of a service: lines with a time and a level, as text or as JSON.

    2026-11-28T09:30:01.123Z INFO request id=7f3a route=/v1/completions status=200 seconds=0.214
    {"time": "2026-11-28T09:30:01.123Z", "level": "info", "message": "request", "id": "7f3a", ...}

Other modules log through `logging` as usual; `extra=fields(...)` adds named values to a line.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Log to a stream, stderr by default. Other packages log from level warning.

    level:      "debug", "info", "warning" or "error"
    log_format: "text" or "json"
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(
        handlers=[handler], level=max(number, logging.WARNING), force=True
    )
    logging.getLogger("disagg").setLevel(number)


def fields(**values: Any) -> dict[str, Any]:
    """The `extra` of a log call: named values of the line; None is left out."""
    return {
        "fields": {name: value for name, value in values.items() if value is not None}
    }


class TextFormatter(logging.Formatter):
    """`TIME LEVEL message name=value ...`; a value with spaces is quoted like JSON."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_time_of(record), record.levelname, record.getMessage()]
        for name, value in _fields_of(record).items():
            words.append(f"{name}={_as_word(value)}")
        text = " ".join(words)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the fields of the line as keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _time_of(record: logging.LogRecord) -> str:
    """UTC in ISO 8601, with milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03}Z"


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})


def _as_word(value: Any) -> str:
    text = str(value)
    is_word = text != "" and text.isprintable() and " " not in text and '"' not in text
    return text if is_word else json.dumps(text)
