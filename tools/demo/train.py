"""Train the demo model from scratch on the endless corpus. Needs torch and transformers, the extra [oracle].

    python tools/demo/train.py --tokenizer sparseflow/demo/tokenizer.json --checkpoint demo.pt

The first step of each window length compiles the model, which takes minutes; --no-compile does without.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from corpus import DocumentSource
from model import new_model
from probes import Probes
from settings import Settings
from training_forward import TrainingForward
from windows import CopyWindows, DocumentWindows, inputs_and_targets

SHORT_CHUNK = 32
LONG_CHUNK = 64
LOG_EVERY = 50
PROBE_EVERY = 100
SAVE_EVERY = 300


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is known of a step after it."""

    loss: float
    balance: float
    gradient_norm: float
    loads: Tensor  # [layers, num_experts]

    def load_entropies(self) -> Tensor:
        """How evenly each layer used its experts [layers]: 1 is evenly."""
        share = self.loads / self.loads.sum(-1, keepdim=True)
        return torch.special.entr(share).sum(-1) / math.log(share.shape[-1])


class Training:
    """A model in training: the model, its optimizer and its data."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, compiled: bool) -> None:
        self.settings = settings
        self.step = 0
        self.model = new_model(settings.seed)
        self.short_forward = TrainingForward(self.model, SHORT_CHUNK, compiled)
        self._long_forward = TrainingForward(self.model, LONG_CHUNK, compiled)
        self._optimizer = _new_optimizer(self.model, settings)
        self._windows = DocumentWindows(tokenizer, DocumentSource(settings.seed, settings.novel, settings.mix))
        self._copy_windows = CopyWindows(tokenizer, settings.seed, settings.copy_stories)

    def take_step(self) -> StepReport:
        """Train on the next batch."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(self.step)
        is_long = self.settings.is_long(self.step)
        forward = self._long_forward if is_long else self.short_forward
        losses = forward.losses(*self._next_batch(is_long))
        loss = losses.tokens.mean()
        (loss + self.settings.balance * losses.balance).backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return StepReport(loss.item(), losses.balance.item(), gradient_norm.item(), losses.loads)

    def save(self, path: Path) -> None:
        """Write a checkpoint, in place of an older one only when it is complete."""
        unfinished = path.with_name(path.name + ".tmp")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "documents_read": self._windows.documents_read,
        }
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint; the settings may have changed since."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self._windows.skip(state["documents_read"])

    def _next_batch(self, is_long: bool) -> tuple[Tensor, Tensor]:
        settings = self.settings
        if is_long:
            return self._windows.batch(settings.long_batch, settings.long_seq)
        copies = settings.copies(self.step)
        windows = [self._copy_windows.window(settings.seq) for _ in range(copies)]
        windows += [self._windows.window(settings.seq) for _ in range(settings.batch - copies)]
        return inputs_and_targets(windows)


def _new_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; weight decay for the matrices but not for the embedding and the convolutions."""
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        is_decayed = weight.ndim >= 2 and "embed" not in name and "conv1d" not in name
        (decayed if is_decayed else others).append(weight)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def run(training: Training, probes: Probes, checkpoint: Path) -> None:
    """Train to the last step, with a log on standard output."""
    settings = training.settings
    recent_losses: list[float] = []
    started = saved = time.monotonic()
    while training.step < settings.steps:
        report = training.take_step()
        recent_losses.append(report.loss)
        now = time.monotonic()
        if training.step % LOG_EVERY == 0:
            print(_log_line(training, report, recent_losses, now - started), flush=True)
            recent_losses.clear()
            started = now
        if training.step % PROBE_EVERY == 0:
            print(f"  {probes.measure(training.short_forward)}", flush=True)
        if now - saved > SAVE_EVERY:
            training.save(checkpoint)
            saved = now
    training.save(checkpoint)
    print(f"done: step {training.step}  {probes.measure(training.short_forward)}")


def _log_line(training: Training, report: StepReport, recent_losses: list[float], seconds: float) -> str:
    settings, step = training.settings, training.step
    entropies = report.load_entropies()
    tokens_per_second = len(recent_losses) * settings.batch * settings.seq / seconds
    return (
        f"step {step}/{settings.steps}  lr {settings.learning_rate(step - 1):.2e}  "
        f"loss {sum(recent_losses) / len(recent_losses):.4f}  balance {report.balance:.3f}  "
        f"gradient {report.gradient_norm:.2f}  load entropy min {entropies.min():.3f} mean {entropies.mean():.3f}  "
        f"{tokens_per_second:.0f} tokens/s"
    )


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json written by train_tokenizer.py")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="file to write, every five minutes and at the end"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint file")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="run the forward pass uncompiled")
    Settings.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.seq % SHORT_CHUNK or options.long_seq % LONG_CHUNK:
        parser.error(f"--seq must be a multiple of {SHORT_CHUNK} and --long-seq of {LONG_CHUNK}")
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    training = Training(Settings.from_options(options), tokenizer, compiled=not options.no_compile)
    if options.resume:
        training.resume(options.checkpoint)
    run(training, Probes(tokenizer), options.checkpoint)


if __name__ == "__main__":
    main()
