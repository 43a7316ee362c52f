"""The training loop that targets and drafters share: progress bar, checkpoints, resume, loss log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tools.train.optim import Optimizers

LOG_EVERY = 25
CHECKPOINT_EVERY = 4 * LOG_EVERY  # a checkpoint's step is that of its last log entry


@dataclass
class LogEntry:
    """Step, mean training loss since the last entry, validation figure (defined by the caller), minutes."""

    step: int
    loss: float
    validation: float
    minutes: float


def train(
    model: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    validate: Callable[[], float],
    steps: int,
    folder: Path,
    lr: float = 0.02,
) -> list[LogEntry]:
    """Train ``model`` in place for ``steps`` steps and return the log.

    A checkpoint lies in ``folder``; when it exists, training continues from it. ``loss_of_step(i)`` must depend
    on ``i`` and the model only, so that a resumed run sees the batches that an unbroken one would have seen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    optimizers = Optimizers(model, steps, lr)
    log: list[LogEntry] = []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        log = [LogEntry(**entry) for entry in state["log"]]
    first = log[-1].step if log else 0
    started = time.monotonic() - 60 * (log[-1].minutes if log else 0.0)
    losses: list[float] = []
    bar = tqdm(range(first, steps), initial=first, total=steps, desc=folder.name, mininterval=10)
    for i in bar:
        loss = loss_of_step(i)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(i)
        losses.append(loss.item())
        last = i + 1 == steps
        if (i + 1) % LOG_EVERY == 0 or last:
            log.append(LogEntry(i + 1, sum(losses) / len(losses), validate(), (time.monotonic() - started) / 60))
            losses = []
            bar.set_postfix(loss=f"{log[-1].loss:.3f}", validation=f"{log[-1].validation:.3f}")
            entries = [asdict(entry) for entry in log]
            (folder / "log.json").write_text(json.dumps(entries))
            if (i + 1) % CHECKPOINT_EVERY == 0 or last:
                state = {"model": model.state_dict(), "optimizers": optimizers.state_dict(), "log": entries}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
    return log
