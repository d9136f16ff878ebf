"""A private session takes everything along that it started, also when its owner is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from disagg.workers.session import Session

OWNER = """
import subprocess, sys, time
from disagg.workers.session import Session
with Session() as session:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    print(child.pid, session.folder, flush=True)
    time.sleep(300)
"""


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_session_that_ends_leaves_no_folder_and_no_environment() -> None:
    before = dict(os.environ)
    with Session() as session:
        assert os.environ["RAY_AUTH_TOKEN"] == session.token
        assert session.folder.is_dir()
        assert session.folder.stat().st_mode & 0o077 == 0
    assert not session.folder.exists()
    assert dict(os.environ) == before


def test_what_a_killed_owner_started_is_killed_too() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split()
    assert running(int(pid))
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    until = time.monotonic() + 30
    while running(int(pid)) or Path(folder).exists():
        assert time.monotonic() < until
        time.sleep(0.02)
