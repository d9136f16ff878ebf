"""Training of the default model, and the figures of its card.

    python -m training.train --books PATH --out DIR [--init DIR] [--minutes N] [--threads N]
    python -m training.train --books PATH --evaluate MODEL_DIR
    python -m training.train --books PATH --out DIR --export MODEL_DIR

The learning rate follows the clock: it has decayed when the minutes are over, however many steps
a busy machine made of them. A stopped training goes on from OUT/checkpoint.pt. This file knows
models, losses and schedules; rows.py knows what a row holds, figures.py judges.
"""

import argparse
import json
import math
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from disagg.errors import DisaggError, ModelError
from disagg.model.describe import DEFAULT_MODEL
from training.figures import LENGTH, figures, refresh_card, token_losses
from training.rows import RowMaker, training_tokens

CHECKPOINT = "checkpoint.pt"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class TrainConfig:
    """Knobs of a training; a budget of minutes or of steps ends it, whichever comes first."""

    minutes: float = 120.0
    steps: int = 1_000_000
    num_rows: int = 4
    length: int = LENGTH
    peak_lr: float = 1e-3
    end_lr_share: float = 0.02
    warmup_steps: int = 60
    weight_decay: float = 0.1
    clip: float = 1.0
    bf16: bool = False  # autocast: fast with AMX, slower than f32 without
    checkpoint_s: float = 180.0
    figures_s: float = 1500.0


class Training:
    """A model, its optimizer, and how far they have come; `elapsed_s` counts over restarts."""

    def __init__(
        self, model: LlamaForCausalLM, rows: RowMaker, config: TrainConfig
    ) -> None:
        self.model = model.train()
        self.rows = rows
        self.config = config
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, 0.98))
        self.step = 0
        self.elapsed_s = 0.0
        self.ticked = time.monotonic()

    def progress(self) -> float:
        """The used share of the budget, 0 to 1."""
        used = self.elapsed_s / (60 * self.config.minutes)
        return min(1.0, max(used, self.step / self.config.steps))

    def lr(self) -> float:
        """Linear warm-up by steps, cosine decay by progress."""
        c = self.config
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress()))
        decay = c.end_lr_share + (1 - c.end_lr_share) * cosine
        return c.peak_lr * decay * min(1.0, (self.step + 1) / c.warmup_steps)

    def train_step(self) -> float:
        """One update; returns the weighted loss of its rows."""
        tokens, weights = self.rows.batch(self.step, self.config.num_rows)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.bf16):
            losses = token_losses(self.model, torch.from_numpy(tokens))
        w = torch.from_numpy(weights)
        loss = (losses * w).sum() / w.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.step += 1
        now = time.monotonic()
        self.elapsed_s += now - self.ticked
        self.ticked = now
        return float(loss.detach())

    def done(self) -> dict[str, Any]:
        """How far the training has come."""
        tokens = self.step * self.config.num_rows * self.config.length
        return {
            "step": self.step,
            "minutes": round(self.elapsed_s / 60, 1),
            "tokens": tokens,
        }

    def save(self, file: Path) -> None:
        """Write everything a resumed training needs; a batch is drawn from the step's own seed."""
        state = {
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "rng": torch.get_rng_state(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, file.with_suffix(".tmp"))
        os.replace(file.with_suffix(".tmp"), file)

    def load(self, file: Path) -> None:
        """Go on from what `save` wrote."""
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]
        self.elapsed_s = state["elapsed_s"]


def load_model(source: Path, *, fresh: bool = False) -> tuple[LlamaForCausalLM, Any]:
    """The model of a folder in f32 (fresh: untrained, of the same shape), and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = LlamaConfig.from_pretrained(source)
    config.max_position_embeddings = LENGTH
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    if fresh:
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float(), tokenizer
    return LlamaForCausalLM.from_pretrained(
        source, config=config, dtype=torch.float32
    ), tokenizer


def write_model(model: LlamaForCausalLM, source: Path, folder: Path) -> None:
    """Write bf16 weights, configs and the tokenizer of `source`; readers see whole files only."""
    staging = folder / "staging"
    staging.mkdir(parents=True, exist_ok=True)
    shipped = LlamaForCausalLM(model.config).to(torch.bfloat16)
    shipped.load_state_dict(model.state_dict())
    shipped.generation_config.update(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
    )
    shipped.save_pretrained(staging)
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, staging / name)
    for file in staging.iterdir():
        file.chmod(0o644)
        os.replace(file, folder / file.name)
    staging.rmdir()


def report(
    training: Training, source: Path, args: argparse.Namespace, effort: int
) -> None:
    """Measure, print, and write the model with its figures to OUT/model."""
    measured = figures(training.model, training.rows.tokenizer, args.books, effort)
    measured |= training.done()
    print(json.dumps(measured), flush=True)
    write_model(training.model, source, args.out / "model")
    (args.out / "model" / "figures.json").write_text(
        json.dumps(measured, indent=1) + "\n"
    )


def begin(args: argparse.Namespace) -> tuple[Training, Path]:
    """The training of OUT as its checkpoint left it, or a new one; and where its tokenizer is."""
    args.out.mkdir(parents=True, exist_ok=True)
    source = args.init or DEFAULT_MODEL
    model, tokenizer = load_model(source, fresh=args.init is None)
    rows = RowMaker(training_tokens(args.books, tokenizer, args.out), tokenizer, LENGTH)
    config = TrainConfig(minutes=args.minutes, peak_lr=args.lr, bf16=args.bf16)
    training = Training(model, rows, config)
    if (args.out / CHECKPOINT).exists():
        training.load(args.out / CHECKPOINT)
    return training, source


def train(args: argparse.Namespace) -> None:
    """Train until the budget is used or SIGTERM comes; checkpoint on the way."""
    training, source = begin(args)
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: stopping.append(signum))
    saved = judged = shown = training.ticked
    since = training.step
    while training.progress() < 1 and not stopping:
        loss = training.train_step()
        now = training.ticked
        if now - shown > 30:
            rows = (training.step - since) * training.config.num_rows
            speed = rows * LENGTH / (now - shown)
            print(
                f"step {training.step} {training.progress():.1%} loss {loss:.3f} "
                f"lr {training.lr():.2e} {speed:,.0f} tokens/s",
                flush=True,
            )
            shown, since = now, training.step
        if now - saved > training.config.checkpoint_s:
            training.save(args.out / CHECKPOINT)
            saved = now
        if now - judged > training.config.figures_s:
            report(training, source, args, 2)
            judged = shown = time.monotonic()
    training.save(args.out / CHECKPOINT)
    if not stopping:
        report(training, source, args, 10)


def evaluate(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Print the figures of a model folder as JSON."""
    model, tokenizer = load_model(folder)
    measured = figures(model, tokenizer, args.books, args.effort)
    print(json.dumps(measured, indent=1))
    return measured


def export(args: argparse.Namespace) -> None:
    """Write the newest checkpoint of OUT into a model folder; refresh its card's figures."""
    if not (args.out / CHECKPOINT).exists():
        raise ModelError(
            f"{args.out} holds no {CHECKPOINT}; train with this --out first"
        )
    training, source = begin(args)
    write_model(training.model, source, args.export)
    measured = evaluate(args.export, args) | training.done()
    (args.export / "figures.json").write_text(json.dumps(measured, indent=1) + "\n")
    refresh_card(args.export / "README.md", measured)


def main() -> None:
    """Read the command line and do one of: evaluate, export, train."""
    parser = argparse.ArgumentParser(
        prog="python -m training.train", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--books", type=Path, required=True, help="one file of `# Title:` books"
    )
    parser.add_argument(
        "--out", type=Path, help="where tokens, checkpoint and model are kept"
    )
    parser.add_argument(
        "--init", type=Path, help="model to begin with (default: fresh weights)"
    )
    parser.add_argument("--minutes", type=float, default=TrainConfig.minutes)
    parser.add_argument(
        "--lr", type=float, default=TrainConfig.peak_lr, help="peak learning rate"
    )
    parser.add_argument("--bf16", action="store_true", help="train under bf16 autocast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--effort", type=int, default=10, help="held-out rows per book")
    parser.add_argument("--evaluate", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--export", type=Path, metavar="MODEL_DIR")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.out is None and not args.evaluate:
        parser.error("--out is needed to train and to export")
    try:
        if args.evaluate:
            evaluate(args.evaluate, args)
        elif args.export:
            export(args)
        else:
            train(args)
    except DisaggError as error:
        parser.exit(error.exit_code, f"{error}\n")


if __name__ == "__main__":
    main()
