"""What nobody foresaw, as an error that ends a request: a bug must not leave anybody waiting."""

import logging

from disagg.errors import DisaggError

log = logging.getLogger(__name__)


def as_error(failure: Exception, what: str) -> DisaggError:
    """A DisaggError as it is; anything else is logged with its traceback and gets a name."""
    if isinstance(failure, DisaggError):
        return failure
    log.error("%s broke", what, exc_info=failure)
    return DisaggError(f"{what} broke: {type(failure).__name__}: {failure}")
