"""Memory of a worker's process, seen in a process of its own."""

import subprocess
import sys

PROGRAM = """
import gc
from disagg.workers.memory import settle_memory

loaded = [[number] for number in range(100_000)]
settle_memory()
assert gc.get_freeze_count() >= 100_000
later = [[number] for number in range(1_000)]
assert len(gc.get_objects()) < 50_000
"""


def test_what_was_loaded_is_not_looked_at_again():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
