"""What a worker's process does with the calls of its service."""

import os
from unittest.mock import Mock

import pytest

from disagg.launch.ray_actor import WorkerActor


def test_a_worker_that_is_stopped_while_it_loads_ends_at_once(monkeypatch):
    actor = WorkerActor.__new__(WorkerActor)
    actor._loaded = False
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))

    with pytest.raises(SystemExit):
        actor.stop()
