"""Writes the Python stubs beside the .proto files. Run from the repository root."""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "disagg/protos"  # the import path that the stubs use for each other


def generate(out: Path) -> None:
    """Write the stubs of every .proto under `out`, at the path of their package."""
    sources = sorted((ROOT / "protos" / "disagg").rglob("*.proto"))
    names = [
        f"{PACKAGE}/{path.relative_to(ROOT / 'protos' / 'disagg')}" for path in sources
    ]
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi")]
    if protoc.main(
        ["protoc", f"-I{PACKAGE}={ROOT / 'protos' / 'disagg'}", *flags, *names]
    ):
        sys.exit("protoc failed")


if __name__ == "__main__":
    generate(ROOT)
