"""Training loop of targets and drafters, and provenance of models."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sglang_dflash_lab.bench.provenance import collect, describe_hardware

WARMUP_STEPS = 30
ADAM = ("embed", "lm_head", "conv1d", "codebook", "base_kernel")  # lookup tables and filters: not for Muon
DECAY_SHARE = 0.5


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz steps (Jordan et al., 2024) for tensors [..., rows, columns].

    torch's Muon takes 2-D parameters only.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                by_shape[tuple(p.shape)].append((p, p.grad.lerp(velocity, group["momentum"])))
            for shape, pairs in by_shape.items():
                updates = _orthogonalise(torch.stack([update for _, update in pairs]))
                lr = group["lr"] * max(1.0, shape[-2] / shape[-1]) ** 0.5
                for (p, _), update in zip(pairs, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-lr)


def _orthogonalise(matrices: Tensor) -> Tensor:
    """Return the nearest matrices with singular values of about 1, [..., rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315  # quintic iteration coefficients of the Muon paper
    x = matrices.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrices.dtype)


class Optimizers:
    """Both optimizers of a model: warm-up, constant rate, linear decay over the last half."""

    def __init__(self, model: nn.Module, steps: int, lr: float = 0.02, adam_lr: float = 3e-3) -> None:
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, p in model.named_parameters():
            is_matrix = p.ndim >= 2 and not any(part in name for part in ADAM)
            (matrices if is_matrix else rest).append(p)
        self.steps = steps
        self._all: list[tuple[torch.optim.Optimizer, float]] = [
            (Muon(matrices, lr), lr),
            (torch.optim.AdamW(rest, adam_lr, betas=(0.9, 0.98), weight_decay=0.0), adam_lr),
        ]

    def step(self, i: int) -> None:
        scale = min((i + 1) / WARMUP_STEPS, 1.0, (self.steps - i) / (self.steps * DECAY_SHARE))
        for optimizer, lr in self._all:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer, _ in self._all]

    def load_state_dict(self, states: list[dict]) -> None:
        for (optimizer, _), state in zip(self._all, states, strict=True):
            optimizer.load_state_dict(state)


LOG_EVERY = 25
CHECKPOINT_EVERY = 4 * LOG_EVERY  # a checkpoint's step is that of its last log entry


@dataclass
class LogEntry:
    """Step, mean training loss since the last entry, the caller's validation figure, minutes."""

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
    """Train ``model`` in place and return the log; resume from a checkpoint in ``folder``.

    ``loss_of_step(i)`` must depend on ``i`` and the model only, so that a resumed run has the same batches.
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


PROVENANCE = "provenance.json"


def write_provenance(folder: Path, seed: int, log: list[LogEntry], validation: str, recipe: dict[str, Any]) -> None:
    run = collect(recipe)
    _write(
        folder,
        {
            **{name: run[name] for name in ("command", "commit")},
            "date": run["time"],
            "machine": describe_hardware(run["hardware"]),
            "versions": run["versions"] | {"tokenizers": version("tokenizers")},
            "seed": seed,
            "recipe": recipe,
            "minutes": round(log[-1].minutes, 1),
            "validation_is": validation,
            "log": [asdict(entry) for entry in log[:: max(1, len(log) // 20)]] + [asdict(log[-1])],
        },
    )


def add_measurement(folder: Path, key: str, table: dict[str, Any]) -> None:
    _write(folder, read_provenance(folder) | {key: table, f"{key}_command": collect({})["command"]})


def read_provenance(folder: Path) -> dict[str, Any]:
    return json.loads((folder / PROVENANCE).read_text())


def _write(folder: Path, content: dict[str, Any]) -> None:
    (folder / PROVENANCE).write_text(json.dumps(content, indent=1) + "\n")
