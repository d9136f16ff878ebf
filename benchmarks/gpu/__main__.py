"""All GPU benchmarks and checks, in one call.

    python -m benchmarks.gpu --out DIR                       all steps, on a GPU
    python -m benchmarks.gpu --out DIR --rehearse            the same at tiny sizes, on a CPU

See benchmarks/README.md.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

NAMES = ("environment", "equality", "attention", "truth", "decode", "transfer", "suite")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for gpu.json and gpu.log"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        metavar="STEP",
        help=f"steps to run: {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=480.0,
        help="seconds for all steps; default: 480",
    )
    parser.add_argument(
        "--cache", type=Path, help="archive of compiled kernels, .tar.xz"
    )
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace, scratch: Path) -> None:
    """The environment of all steps, before Triton and torch are imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
        "1"  # steps are forked before CUDA begins
    )
    os.environ.setdefault("TRITON_CACHE_DIR", str(scratch / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(scratch / "inductor"))
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.cache:
        os.environ["DISAGG_KERNEL_CACHE"] = str(options.cache.resolve())


def main(arguments: list[str]) -> int:
    """Run the steps and print the summary; 1 if one failed."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prepare(options, scratch)
        from benchmarks.gpu.running import (
            run_steps,
            summary,
        )  # torch, so behind `prepare`
        from benchmarks.gpu.steps import STEPS

        steps = [
            STEPS["warmup"],
            *(STEPS[name] for name in NAMES if name in options.only),
        ]
        results = run_steps(
            steps, options.rehearse, options.out, scratch, options.budget
        )
        print("\n".join(summary(results)))
        return int(any(x.failures for x in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
