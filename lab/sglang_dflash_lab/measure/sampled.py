"""Tokens per step of sampled requests, with and without the target's noise in drafts.

``python -m sglang_dflash_lab.measure.sampled`` prints a table of a tiny pair by the reference decoder, in float32. The
interval of a gain is the 95 % percentile bootstrap over prompts. Rejection sampling is simulated for DFlash2: SGLang's
worker accepts the best tokens of a plain drafter with the target's probability of them, as a seeded draw does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import typer

from sglang_dflash_lab.pairs import drafter_kinds, drafter_path, target_path
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.train.hf import load_tokenizer
from sglang_dflash_lab.train.measure import prompt_ids
from sglang_dflash_lab.train.reference_decoder import ReferenceDecoder
from sglang_dflash_lab.train.sampling import UNSURE, Rejection, Sampling

NEW_TOKENS, PROMPT_SEED = 96, 77
SETTINGS = ((1.0, 1.0), (1.0, 0.95), (0.7, 1.0), (0.7, 0.95), (0.3, 1.0), (0.3, 0.95))
BEST, ALWAYS = 0.0, 2.0  # of ``unsure``


def main(pair: str = "tiny-forks", n: int = 8, threshold: list[float] = [BEST, UNSURE, ALWAYS]) -> None:  # noqa: B006
    """Decode ``n`` held-out prompts per task with each ``threshold``, and compare with the first."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(target_path(pair))
    asked = [prompt_ids(tokenizer, each) for task in TASKS for each in prompts(task, "heldout", n, PROMPT_SEED)]
    rule = threshold.index(UNSURE) if UNSURE in threshold else 0
    columns = (*map(str, threshold), f"rejection sampling (simulated), against {threshold[rule]}")
    print(f"{len(asked)} prompts", f"| drafter | T, top_p | {' | '.join(columns)} |", sep="\n")
    for drafter in drafter_kinds(pair):
        decoder = ReferenceDecoder.load(target_path(pair), drafter_path(pair, drafter))
        greedy = [decoder.decode(prompt, NEW_TOKENS).accept_lengths for prompt in asked]
        print(f"| `{drafter}` | greedy | {sum(map(sum, greedy)) / sum(map(len, greedy)):.2f} |", flush=True)
        rejects = decoder.drafter.candidate_selector is not None
        for temperature, top_p in SETTINGS:
            counts = np.zeros((len(threshold) + rejects, len(asked), 2))  # tokens, steps
            for i, prompt in enumerate(asked):
                sampling = Sampling(1000 + i, temperature, top_p)
                ways = [replace(sampling, unsure=unsure) for unsure in threshold]
                for j, way in enumerate([*ways, *[Rejection(1000 + i, temperature, top_p)] * rejects]):
                    decoded = decoder.decode(prompt, NEW_TOKENS, sampling=way)
                    counts[j, i] = sum(decoded.accept_lengths), len(decoded.steps)
            cells = [_cell(each, counts[0 if j < len(threshold) else rule]) for j, each in enumerate(counts)]
            print(f"| `{drafter}` | {temperature}, {top_p} | {' | '.join(cells)} |", flush=True)


def _cell(counts: np.ndarray, others: np.ndarray) -> str:
    tokens, steps = counts.sum(0)
    drawn = np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))
    (mine, taken), (theirs, took) = (each[drawn].sum(1).T for each in (counts, others))
    low, high = np.percentile(100 * (mine / taken / (theirs / took) - 1), (2.5, 97.5))
    gain = 100 * (tokens / steps / (others.sum(0)[0] / others.sum(0)[1]) - 1)
    return f"{tokens / steps:.2f} ({gain:+.1f} % [{low:.1f}, {high:.1f}])"


if __name__ == "__main__":
    typer.run(main)
