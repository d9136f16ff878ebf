"""Keeps a command running while a Ray cluster lives, and leaves nothing on this host afterwards.

    keep.py run HOST:PORT [COMMAND ...]    in the background, in place of an older one
    keep.py stop                           end it, and its command

`ray up` starts processes and forgets them; `ray down` runs `ray stop` on the head alone. So every
host has one of these: it starts COMMAND again when that dies, until it ends well or Ray is gone
from HOST:PORT, and then stops what Ray left here. Knows no disagg; standard library alone.
"""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

FOLDER = Path.home() / ".disagg"
LOCK, LOG = FOLDER / "keep.lock", FOLDER / "keep.log"
CHECK_S = 1.0
REFUSED_S = 5.0  # the host is there and Ray is not: it was stopped
SILENT_S = 90.0  # nothing answers; the raylet gives up after 60 s by itself
PAUSE_S = (0.25, 30.0)  # before a command is started again, the first time and at most
GRACE_S = 15.0  # for a command that is told to end


class Watch:
    """Whether Ray is still there, from one look after the other."""

    def __init__(self, now: float) -> None:
        self._seen = self._heard = now

    def look(self, answer: str, now: float) -> bool:
        """`answer`: "open", "refused" or "silent". False: it is gone."""
        if answer == "open":
            self._seen = now
        if answer != "refused":
            self._heard = now  # a refusal counts only in a row of refusals
        return now - self._heard < REFUSED_S and now - self._seen < SILENT_S


def knock(host: str, port: int) -> str:
    """What a port says: "open", "refused" or "silent"."""
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
    return "open"


class KeptCommand:
    """A command that is started again when it fails, later and later when it fails at once.

    process: the one that runs, if one does
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self.process: subprocess.Popen[bytes] | None = None
        self._pause, self._next, self._started = PAUSE_S[0], 0.0, 0.0

    def look(self, now: float) -> None:
        """Start the command unless it runs, ended well, or failed a moment ago."""
        if not self._command:
            return
        if self.process is not None:
            if self.process.poll() is None:
                return
            if self.process.returncode == 0:
                say("ended as it was told to")
                self._command = []
                return
            if now - self._started > PAUSE_S[1]:
                self._pause = PAUSE_S[0]
            say(f"ended with {self.process.returncode}; again in {self._pause:g} s")
            self._next, self._pause = (
                now + self._pause,
                min(2 * self._pause, PAUSE_S[1]),
            )
            self.process = None
        if now >= self._next:
            say("starting " + " ".join(self._command))
            self.process, self._started = subprocess.Popen(self._command), now

    def wait(self) -> None:
        """CHECK_S, or less: until the command ends or is to be started again."""
        if not self._command:
            time.sleep(CHECK_S)
        elif self.process is None:
            time.sleep(min(CHECK_S, max(0.0, self._next - time.monotonic())))
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CHECK_S)

    def end(self) -> None:
        """Tell it to end, then make it."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def hold(address: str, command: list[str]) -> None:
    """Runs as long as Ray does; a SIGTERM ends it and leaves Ray alone."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit

    with LOCK.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        signal.signal(signal.SIGTERM, leave)
        host, _, port = address.rpartition(":")
        watch, kept = Watch(time.monotonic()), KeptCommand(command)
        try:
            while watch.look(knock(host, int(port)), time.monotonic()):
                kept.look(time.monotonic())
                kept.wait()
        finally:
            kept.end()
        say(f"no Ray at {address} any more; stopping what it left here")
        subprocess.run(
            ["ray", "stop", "--force"], stdout=subprocess.DEVNULL, check=False
        )


def stop() -> None:
    """End the one that runs, if one does; returns when its command has ended too."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    until = time.monotonic() + 2 * GRACE_S
    with LOCK.open("a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read()  # empty for a moment, while it starts
                if holder:
                    late = time.monotonic() > until
                    os.kill(int(holder), signal.SIGKILL if late else signal.SIGTERM)
                time.sleep(0.2)
            else:
                return


def run(address: str, command: list[str]) -> None:
    """Replace the one that runs by a new one, which outlives this process and its terminal."""
    stop()
    with LOG.open("ab") as log:
        subprocess.Popen(
            [sys.executable, __file__, "hold", address, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def say(words: str) -> None:
    """A line of the log."""
    print(time.strftime("%F %T"), words, flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", address, *command]:
            run(address, command)
        case ["hold", address, *command]:
            hold(address, command)
        case ["stop"]:
            stop()
        case _:
            sys.exit(f"usage: {__doc__}")
