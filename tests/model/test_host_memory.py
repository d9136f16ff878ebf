from pathlib import Path

import pytest

from disagg.model import host_memory
from disagg.model.host_memory import available_memory, total_memory


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 8 GiB, of which 6 are available."""
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(
        "os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 21}.get
    )
    (tmp_path / "meminfo").write_text(
        "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n"
    )
    return tmp_path


def test_memory_is_that_of_the_host_without_a_limit(host: Path) -> None:
    (host / "memory.max").write_text("max\n")
    (host / "memory.current").write_text("1\n")

    assert total_memory() == 8 << 30
    assert available_memory() == 6 << 30


@pytest.mark.parametrize("files", host_memory.LIMITS)
def test_memory_of_a_container_is_its_limit(host: Path, files: tuple[str, ...]) -> None:
    limit, used, stat = (host / file for file in files)
    limit.parent.mkdir(exist_ok=True)
    limit.write_text(f"{3 << 30}\n")
    used.write_text(f"{5 << 29}\n")
    stat.write_text(f"anon 5\ninactive_file {1 << 29}\nactive_file {1 << 30}\n")

    assert total_memory() == 3 << 30
    assert available_memory() == 2 << 30


def test_without_proc_all_memory_counts_as_available(host: Path) -> None:
    (host / "meminfo").unlink()

    assert available_memory() == 8 << 30
