"""Train a whole pair: tokenizer, target, drafters, figures. Every part resumes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from sglang_dflash_lab.pairs import drafter_kinds, drafter_path
from sglang_dflash_lab.train.drafter_training import RECIPES, train_drafter
from sglang_dflash_lab.train.loop import add_measurement, write_provenance
from sglang_dflash_lab.train.measure import measure_accept_lengths, measure_accuracy
from sglang_dflash_lab.train.target_training import FORKS, STAGES, START_FROM, train_target
from sglang_dflash_lab.train.tokenizer import train_tokenizer

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
    """Train the named pair into ``out``/target and ``out``/drafter-KIND.

    Args:
        work: checkpoints, tokenizer and generated data; parts in ``out`` are not trained again.
        steps: of each stage and drafter, replaces the recipe's, for a trial.
        kinds: drafters to train, of ``drafter_kinds(name)``.
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
            known = kind in drafter_kinds(START_FROM[name])
            start = drafter_path(START_FROM[name], kind) if known else out / "drafter-good"
        stage = RECIPES[kind].of_stage
        of_target, drafter_work = target, work
        if stage is not None:
            of_target, drafter_work = work / f"target/stage-{stage}/target", work / f"stage-{stage}"
        kind_steps = steps or (STEPS_FROM_TRAINED if start else None)
        sampled = name in FORKS
        train_drafter(kind, of_target, folder, drafter_work, seed, device, kind_steps, start=start, sampled=sampled)
        if measure:
            add_measurement(folder, "accept_lengths", measure_accept_lengths(target, folder, ACCEPT_PROMPTS, device))
