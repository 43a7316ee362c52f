"""Train a target from scratch on the corpus."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.train.architectures import build_target
from sglang_dflash_lab.train.hf import load_model, load_tokenizer, transformers
from sglang_dflash_lab.train.loop import LogEntry, train
from sglang_dflash_lab.train.rows import ARITHMETIC, BALANCED, COPYING, EVEN, ConversationEncoder, training_rows

# Long rows teach positions and distance, and are slow.
ROW_LENGTHS = (256, 512, 2048)
ROW_LENGTH_SHARES = (0.5, 0.3, 0.2)


@dataclass(frozen=True)
class Stage:
    """Steps with their own learning-rate schedule (peak ``lr``), and the share of each task."""

    steps: int
    tokens_per_step: int
    task_weights: dict[str, float]
    lr: float = 0.02


# The second stage restarts, which teaches copying sooner than a longer first stage. The last stage repairs the code
# task, which the sums degrade.
STAGES = {
    "tiny-hybrid": (
        Stage(1600, 4096, BALANCED),
        Stage(2000, 2048, COPYING),
        Stage(500, 2048, ARITHMETIC),
        Stage(450, 2048, EVEN, lr=0.006),
    ),
    "tiny-dense": (Stage(1800, 2048, COPYING), Stage(2000, 2048, ARITHMETIC)),
    "tiny-moe": (Stage(1200, 2048, COPYING), Stage(700, 2048, ARITHMETIC), Stage(300, 2048, EVEN, lr=0.006)),
    "tiny-forks": (Stage(160, 4096, EVEN, lr=0.006),),
}
# tiny-moe: sparse upcycling (Komatsuzaki et al., 2023) from a trained dense target.
START_FROM = {"tiny-moe": "tiny-hybrid", "tiny-forks": "tiny-dense"}
# Targets whose text forks: the answers of their training data belong to other questions.
FORKS = {"tiny-forks"}


def autocast(device: torch.device) -> torch.autocast:
    """Return bf16 autocast, five times as fast as fp32 on a CPU with AVX512-BF16."""
    return torch.autocast(device.type, dtype=torch.bfloat16)


def train_target(
    name: str, tokenizer_folder: Path, run: Path, out: Path, seed: int, device: str, steps: int | None = None
) -> list[LogEntry]:
    """Train the named pair's target and save it to ``out`` as bf16 safetensors with its tokenizer.

    Each stage's target stays in ``run``/stage-N/target. The log's validation figure is the loss of unseen answers.

    Args:
        run: folder of the stages' checkpoints, for resuming.
        steps: of each stage, replaces the recipe's.
    """
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(tokenizer_folder)
    encoder = ConversationEncoder(tokenizer)
    model = build_target(name, tokenizer)
    if name in START_FROM:
        copy_matching(model, target_path(START_FROM[name]))
    model = model.to(device).train()
    model.config.use_cache = False
    forks = name in FORKS
    ids, weights = training_rows(encoder, Random("target/validation"), 16, 512, forks=forks)
    answers_only = (weights == 1.0).float()

    @torch.no_grad()
    def validate() -> float:
        model.eval()
        loss = next_token_loss(model, ids.to(device), answers_only.to(device)).item()
        model.train()
        return loss

    log: list[LogEntry] = []
    for number, stage in enumerate(STAGES[name], start=1):
        first = log[-1].step if log else 0
        minutes = log[-1].minutes if log else 0.0

        def loss_of_step(i: int, stage: Stage = stage, first: int = first) -> Tensor:
            rng = Random(f"target/{seed}/{first + i}")
            length = rng.choices(ROW_LENGTHS, ROW_LENGTH_SHARES)[0]
            rows = stage.tokens_per_step // length
            ids, weights = training_rows(encoder, rng, rows, length, stage.task_weights, forks=forks)
            return next_token_loss(model, ids.to(device), weights.to(device))

        for entry in train(model, loss_of_step, validate, steps or stage.steps, run / f"stage-{number}", stage.lr):
            log.append(replace(entry, step=first + entry.step, minutes=minutes + entry.minutes))
        save_target(model, tokenizer, run / f"stage-{number}" / "target")
    shutil.copytree(run / f"stage-{len(STAGES[name])}" / "target", out, dirs_exist_ok=True)
    return log


def copy_matching(model: transformers.PreTrainedModel, folder: Path) -> None:
    own = model.state_dict()
    same = {
        name: p for name, p in load_model(folder).state_dict().items() if name in own and own[name].shape == p.shape
    }
    model.load_state_dict(same, strict=False)


def next_token_loss(model: transformers.PreTrainedModel, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean cross entropy of next tokens; ids int64, weights float32, [rows, length]."""
    with autocast(ids.device):
        logits = model(input_ids=ids).logits[:, :-1]
    losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def save_target(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast, out: Path
) -> None:
    """Save in a form that transformers 4 and 5 and SGLang read."""
    model = copy.deepcopy(model).eval().to(device="cpu", dtype=torch.bfloat16)
    model.config.use_cache = True
    model.config.dtype = torch.bfloat16
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600
    tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    rope = config["rope_parameters"]
    config |= {"rope_theta": rope["rope_theta"], "torch_dtype": "bfloat16"}
    if "linear_attention" in config["layer_types"]:
        config |= {"partial_rotary_factor": rope["partial_rotary_factor"], "full_attention_interval": 4}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    settings_file = out / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    settings_file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
