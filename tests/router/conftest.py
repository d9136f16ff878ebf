"""Real workers behind the router, from the tests of workers."""

from tests.worker.conftest import home, runners, story

__all__ = ["home", "runners", "story"]
