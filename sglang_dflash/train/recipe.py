"""Train a whole pair: tokenizer, target, the target's output, drafters, figures. Every part resumes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from sglang_dflash.pairs import drafter_path
from sglang_dflash.train.drafter_training import RECIPES, Chat, corpus_prompts, target_output, train_drafter
from sglang_dflash.train.measure import measure_accept_lengths, measure_accuracy
from sglang_dflash.train.provenance import add_measurement, write_provenance
from sglang_dflash.train.target_training import STAGES, START_FROM, train_target
from sglang_dflash.train.tokenizer import train_tokenizer

ACCURACY_PROMPTS = 100
ACCEPT_PROMPTS = 12
STEPS_FROM_TRAINED = 260  # of a drafter that starts from a trained one


def train_pair(
    name: str,
    out: Path,
    work: Path,
    seed: int,
    device: str,
    steps: int | None,
    kinds: list[str],
    measure: bool = True,
) -> None:
    """Train the named pair into `out`/target and `out`/drafter-KIND.

    Args:
        work: checkpoints, tokenizer and generated data; a part whose result is in `out` is not trained again.
        steps: of the target and of each drafter instead of the recipe's, for a quick trial.
        kinds: drafters to train, of `drafter_kinds(name)`.
        measure: also measure accuracy and accept lengths, which takes about as long as training a drafter.
    """
    target = out / "target"
    if not (target / "provenance.json").exists():
        train_tokenizer(work / "tokenizer", seed)
        log = train_target(name, work / "tokenizer", work / "target", target, seed, device, steps)
        recipe = {"stages": [asdict(stage) for stage in STAGES[name]], "start_from": START_FROM.get(name)}
        write_provenance(target, seed, log, "validation loss of answers", recipe)
        if measure:
            add_measurement(target, "accuracy", measure_accuracy(target, ACCURACY_PROMPTS, device))
    for kind in kinds:
        folder = out / f"drafter-{kind}"
        if (folder / "provenance.json").exists():
            continue
        start = out / f"drafter-{RECIPES[kind].start_from}" if RECIPES[kind].start_from else None
        if name in START_FROM:
            start = drafter_path(START_FROM[name], kind)
        stage = RECIPES[kind].of_stage
        of_target, data_folder = (target, work) if stage is None else _stage(work, stage)
        kind_steps = steps or (STEPS_FROM_TRAINED if start else None)
        train_drafter_kind(kind, of_target, folder, data_folder, seed, device, kind_steps, start=start)
        if measure:
            add_measurement(folder, "accept_lengths", measure_accept_lengths(target, folder, ACCEPT_PROMPTS, device))


def train_drafter_kind(
    kind: str,
    target: Path,
    out: Path,
    work: Path,
    seed: int,
    device: str,
    steps: int | None = None,
    chats: list[tuple[Chat, bool]] | None = None,
    mask_token_id: int | None = None,
    start: Path | None = None,
) -> None:
    """Train one kind of drafter for the target in `target`, which may be the user's own.

    Args:
        chats: what the target shall answer, instead of the corpus's prompts; see `corpus_prompts`.
        mask_token_id: where the target's tokenizer has no mask token: an id that no text contains.
        start: a trained drafter of the same widths to start from.
    """
    recipe = RECIPES[kind] if steps is None else RECIPES[kind].with_steps(steps)
    data_file = work / "target-output.pt"
    if not data_file.exists():
        work.mkdir(parents=True, exist_ok=True)
        torch.save(target_output(target, chats or corpus_prompts(seed), device), data_file)
    data = torch.load(data_file, weights_only=True)
    log = train_drafter(recipe, target, data, work / f"drafter-{kind}", out, seed, device, mask_token_id, start)
    write_provenance(out, seed, log, "validation accept length", asdict(recipe) | {"started": start is not None})


def _stage(work: Path, stage: int) -> tuple[Path, Path]:
    """The target after a stage of its training, and the work folder of drafters for it."""
    return work / "target" / f"stage-{stage}" / "target", work / f"stage-{stage}"
