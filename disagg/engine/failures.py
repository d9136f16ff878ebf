"""Errors of one request, as others are told of them."""

import logging

import torch

from disagg.errors import CapacityError, DisaggError

log = logging.getLogger(__name__)


def named(error: Exception) -> DisaggError:
    """An error that can be told to others, without the frames and the tensors that it came by."""
    if isinstance(error, DisaggError):
        return error.with_traceback(None)
    log.error("a request broke", exc_info=error)
    kind = CapacityError if is_memory_error(error) else DisaggError
    return kind(f"{type(error).__name__}: {error}")


def is_memory_error(error: Exception) -> bool:
    """Whether there was not enough memory, on a host or a device."""
    full = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return full or "can't allocate memory" in str(error)  # as torch says it of a host
