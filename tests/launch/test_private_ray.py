"""A private session takes everything along that it started, also when its owner is killed."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from disagg.launch.private_ray import Session
from tests.processes import lives, wait_for

OWNER = """
import json, subprocess, sys, time
from disagg.launch.private_ray import Session
with Session() as session:
    log = open(session.folder / "log", "w")
    environment = json.loads(sys.argv[2])
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=log, env=environment)
    log.close()
    print(child.pid, session.folder, flush=True)
    time.sleep(300)
"""

STAYS = "import time; time.sleep(300)"
HIDES = """
import os, sys, time
owner = os.getppid()
while os.getppid() == owner:
    time.sleep(0.02)
time.sleep(1)  # by now it was seen
os.close(1)
os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)"], {})
"""


@pytest.mark.parametrize("tmp", ["/tmp", f"/tmp/{'x' * 20}"], ids=len)
def test_a_session_that_ends_leaves_no_folder_and_no_environment(
    tmp, monkeypatch
) -> None:
    """And one with a long name would leave no room for those of Ray's sockets."""
    monkeypatch.setattr(tempfile, "tempdir", tmp)
    before = dict(os.environ)
    with Session() as session:
        assert os.environ["RAY_AUTH_TOKEN"] == session.token
        assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
        assert os.environ["LRU_CACHE_CAPACITY"] == "256"
        assert (
            int(dict(os.environ)["RAY_health_check_timeout_ms"]) >= 60_000
        )  # busy is not dead
        assert session.folder.is_dir()
        assert str(session.folder.parent) == "/tmp"
        assert session.folder.stat().st_mode & 0o077 == 0
    assert not session.folder.exists()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("child", "environment"),
    [(STAYS, "null"), (STAYS, "{}"), (HIDES, "null")],
    ids=["stays", "has only a log of it", "hides when it was seen"],
)
def test_what_a_killed_owner_started_is_killed_too(
    child: str, environment: str
) -> None:
    command = [sys.executable, "-c", OWNER, child, environment]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid, folder = owner.stdout.readline().split()
    assert lives(int(pid))
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    wait_for(lambda: not lives(int(pid)) and not Path(folder).exists(), 30)
