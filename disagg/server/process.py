"""The process that serves clients: its open files and its garbage collector."""

import gc
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from disagg.config import ServerConfig
from disagg.log import fields

MAX_FILES = 1 << 20  # the limit of open files is raised up to this
RESERVED_FILES = 200  # of them not for clients: workers, log, model
MIN_CONNECTIONS = 1000  # fewer are worth a warning
# a collection of young objects when there are that many more, of the older ones after so many
# of the former: a full one stops every stream for some 0.3 s when 1,000 are open
COLLECTOR_THRESHOLDS = (20_000, 20, 100)

log = logging.getLogger(__name__)


def raise_file_limit(config: ServerConfig) -> None:
    """Allow as many open files as the system does, and log how many connections that makes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    connections = max_connections(config)
    numbers = fields(open_files=max(soft, limit), connections=connections)
    if connections < MIN_CONNECTIONS:
        log.warning("few connections are possible; raise ulimit -n", extra=numbers)
    elif soft < limit:
        log.info("raised the limit of open files", extra=numbers)


def max_connections(config: ServerConfig) -> int:
    """How many client connections there may be: as configured, and as open files allow."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = max(1, max_files - RESERVED_FILES)
    if config.max_connections is None:
        return possible
    return min(config.max_connections, possible)


@contextmanager
def settled_collector() -> Iterator[None]:
    """While this block runs, the collector skips the objects of before, and looks less often."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
