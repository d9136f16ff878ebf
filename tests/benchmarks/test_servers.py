"""Servers that benchmarks start."""

import pytest

from benchmarks.servers import ServerCommand, running
from disagg.errors import PeerLostError


def test_a_server_that_ends_says_what_it_wrote(tmp_path):
    script = tmp_path / "server"
    script.write_text("#!/bin/sh\necho no such model\nexit 1\n")
    script.chmod(0o755)
    command = ServerCommand("broken", [str(script)], {})

    with (
        pytest.raises(PeerLostError, match="broken ended: no such model"),
        running(command, tmp_path),
    ):
        pass
