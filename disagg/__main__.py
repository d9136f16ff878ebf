"""`disagg` and `python -m disagg`."""

import os
import sys

# read by libraries when they are imported, by those of workers too; what a user has set stays
QUIET = {
    "GRPC_VERBOSITY": "NONE",  # what it logs of broken connections, errors here say better
    "TOKENIZERS_PARALLELISM": "false",  # else it warns when a process is started after its use
}


def main() -> None:
    """Run the command line and exit with its status."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if (
            getattr(sys, name) is None
        ):  # it was closed: what is opened next would take its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    try:
        from disagg.cli.app import (
            run,
        )  # takes a while, in which Ctrl-C may be pressed already

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130  # as of CancelledError
    sys.exit(status)


if __name__ == "__main__":
    main()
