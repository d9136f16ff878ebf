"""`disagg` and `python -m disagg`."""

import sys

from disagg.cli.app import run


def main() -> None:
    """Run the command line and exit with its status."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
