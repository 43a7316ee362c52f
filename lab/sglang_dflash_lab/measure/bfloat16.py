"""Compare DFLASH's greedy text with plain decoding's in bfloat16: ``python -m sglang_dflash_lab.measure.bfloat16``.

One server per pair and arm answers the same prompts. Texts are JSON lines in a folder; the same command resumes.
References are plain decoding at another concurrency, and float32 logits of transformers.

A step is the distance of neighbouring bfloat16 numbers at a logit: 0.125 from 16 to 32.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product, zip_longest
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import httpx
import typer

from sglang_dflash_lab.bench.figures import number
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.server import Launch, running
from sglang_dflash_lab.measure import launch, token_ids
from sglang_dflash_lab.pairs import NAMES, target_path
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.tables import MISSING, Table

MODES = "ar,dflash:16,dflash:8,dflash:4,builtin:16"
TOP = 8  # most likely tokens per position
CONCURRENCY, OTHER_CONCURRENCY = 8, 5
PEERS = Path(__file__).resolve().with_name("peers")


HELD_OUT, RANDOM = "held-out", "random"  # prefixes of prompt names


@dataclass(frozen=True)
class Text:
    """One line of a file.

    Attributes:
        tops: per new token, the ``TOP`` most likely tokens with log-probability (reference: logit).
        blocks: verified blocks; 0 without speculation.
    """

    prompt: str
    tokens: list[int]
    tops: list[list[tuple[int, float]]]
    blocks: int = 0


def file_of(folder: Path, pair: str, dtype: str, name: str) -> Path:
    return folder / f"{pair} {dtype} {name}.jsonl"


Prompts = dict[str, list[int]]
Texts = Mapping[str, "Text"]


class Lines:
    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.texts = {text.prompt: text for text in (Text(**json.loads(line)) for line in lines)}

    def add(self, text: Text) -> None:
        self.texts[text.prompt] = text
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(text)) + "\n")


def missing(lines: Lines, asked: Prompts) -> list[str]:
    return [name for name in asked if name not in lines.texts]


def named_prompts(pair: str, number: int, random: int) -> Prompts:
    """Return token ids by name; larger numbers only add prompts."""
    per_task = [prompts(task, n=-(-number // len(TASKS))) for task in TASKS]
    held_out = [prompt for turn in zip(*per_task, strict=True) for prompt in turn][:number]
    rng, vocab = Random(0), json.loads((target_path(pair) / "config.json").read_text())["vocab_size"]
    named = {f"{HELD_OUT} {i}": ids for i, ids in enumerate(token_ids(pair, held_out))}
    return named | {f"{RANDOM} {i}": [rng.randrange(vocab) for _ in range(24)] for i in range(random)}


def server(pair: str, arm: str, dtype: str, flags: Sequence[str]) -> Launch:
    # Overrides the tiny pairs' --dtype float32.
    mode = f"{arm}+PYTHONPATH={PEERS}" if arm.startswith("builtin") else arm
    return launch(pair, mode, CONCURRENCY, "--dtype", dtype, *flags)


async def write(url: str, asked: Prompts, lines: Lines, concurrency: int, new_tokens: int) -> None:
    limit = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=3600, trust_env=False) as http:
        (await http.post("/flush_cache", params={"timeout": 30})).raise_for_status()

        async def one(name: str) -> None:
            sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": name.startswith(RANDOM)}
            body = {"input_ids": asked[name], "sampling_params": sampling}
            async with limit:
                reply = await http.post("/generate", json={**body, "return_logprob": True, "top_logprobs_num": TOP})
            answer = reply.raise_for_status().json()
            meta = answer["meta_info"]
            tops = _tops(meta["output_top_logprobs"])
            lines.add(Text(name, answer["output_ids"], tops, meta.get("spec_verify_ct", 0)))

        async with asyncio.TaskGroup() as group:
            for name in missing(lines, asked):
                group.create_task(one(name))


def _tops(found: list[list[list[Any]]]) -> list[list[tuple[int, float]]]:
    return [[(token, value) for value, token, *_ in position] for position in found]


def reference(pair: str, asked: Prompts, written: Lines, lines: Lines) -> None:
    """Add transformers' float32 logits before each token of the ``written`` texts."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target_path(pair), dtype=torch.float32).eval()
    for name in missing(lines, asked):
        ids, tokens = asked[name], written.texts[name].tokens
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *tokens[:-1]]]), logits_to_keep=len(tokens)).logits[0]
        values, indices = (part.tolist() for part in logits.topk(TOP))
        lines.add(Text(name, tokens, [list(zip(*each, strict=True)) for each in zip(indices, values, strict=True)]))


def measure(
    pair: str, arm: str, dtype: str, folder: Path, asked: Prompts, new_tokens: int, flags: Sequence[str]
) -> None:
    def lines(name: str) -> Lines:
        return Lines(file_of(folder, pair, dtype, name))

    written, again, is_plain = lines(arm), lines("ar again"), (arm, dtype) == ("ar", "bfloat16")
    if missing(written, asked) or is_plain and missing(again, asked):
        log = folder / f"{pair} {dtype} {arm}.log"
        with running(server(pair, arm, dtype, flags), log) as url:
            asyncio.run(write(url, asked, written, CONCURRENCY, new_tokens))
            if is_plain:
                asyncio.run(write(url, asked, again, OTHER_CONCURRENCY, new_tokens))
    if is_plain:
        reference(pair, asked, written, lines("reference"))


def first_difference(plain: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Return the first position at which two texts differ (a prefix's length), or None."""
    pairs = zip_longest(plain, tokens)
    return next((position for position, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def gap(top: Sequence[tuple[int, float]], token: int, other: int) -> float:
    values = dict(top)
    return values[token] - values[other] if token in values and other in values else math.inf


def step_at(logit: float) -> float:
    """Return the distance of neighbouring bfloat16 numbers (8 significant bits) at ``logit``."""
    return math.ldexp(1.0, math.frexp(logit)[1] - 8)


@dataclass(frozen=True)
class Comparison:
    """An arm compared with plain decoding.

    Attributes:
        tokens: compared tokens, up to each first difference.
        gaps: per first difference, the float32 gap of the two tokens, in logits and in steps.
        moved: change of that gap from plain decoding to the arm, in steps.
        changes: change of the best two tokens' gap at every compared position, in steps.
    """

    texts: int
    tokens: int
    gaps: list[tuple[float, float]]
    moved: list[float]
    changes: list[float]


def compare(plain: Texts, arm: Texts, reference: Texts, kind: str) -> Comparison:
    found = Comparison(0, 0, [], [], [])
    for name in plain.keys() & arm.keys() & reference.keys():
        if not name.startswith(kind):
            continue
        ours, theirs, exact = plain[name], arm[name], reference[name]
        position = first_difference(ours.tokens, theirs.tokens)
        compared = len(ours.tokens) if position is None else position + 1
        found = replace(found, texts=found.texts + 1, tokens=found.tokens + compared)
        for before, top, logits in zip(ours.tops[:compared], theirs.tops, exact.tops, strict=False):
            (first, _), (second, _) = before[:2]
            change = gap(before, first, second) - gap(top, first, second)
            found.changes.append(abs(change) / step_at(logits[0][1]))
        if position is not None:
            choices, step = (ours.tokens[position], theirs.tokens[position]), step_at(exact.tops[position][0][1])
            decode, chosen, precise = (gap(view.tops[position], *choices) for view in (ours, theirs, exact))
            found.gaps.append((abs(precise), abs(precise) / step))
            found.moved.append((decode - chosen) / step)
    return found


SPECULATING = {"ours, 16": "dflash:16", "ours, 8": "dflash:8", "ours, 4": "dflash:4", "builtin, 16": "builtin:16"}
COMPARED = {
    **{title: ("bfloat16", name) for title, name in SPECULATING.items()},
    "plain, other batches": ("bfloat16", "ar again"),
    "plain, float32": ("float32", "ar"),
}
NEAR = 4  # steps within which the target is undecided
DIFFERENCES = [
    *("pair", "prompts", "arm", "texts", "differ", "per 1,000 tokens", "gap", "largest", "in steps", "largest"),
    *(f"over {NEAR}", "accept length", "in float32"),
]
CHANGES = ["pair", "arm", "positions", "changed", "99 %", "largest", "largest at a first difference"]


def accept_length(texts: Texts, kind: str) -> float:
    """Return new tokens after the first per verified block."""
    found = [text for name, text in texts.items() if name.startswith(kind)]
    blocks = sum(text.blocks for text in found)
    return sum(len(text.tokens) - 1 for text in found) / blocks if blocks else math.nan


def spread(values: Sequence[float], digits: int) -> list[str]:
    return [number(median(values), digits), number(max(values), digits)] if values else [MISSING, MISSING]


def difference_row(found: Comparison) -> list[str]:
    gaps, steps = zip(*found.gaps, strict=True) if found.gaps else ((), ())
    counts = [str(found.texts), str(len(gaps)), number(1000 * len(gaps) / found.tokens)]
    return [*counts, *spread(gaps, 3), *spread(steps, 2), str(sum(step > NEAR for step in steps))]


def change_row(found: Comparison) -> list[str]:
    ordered = sorted(found.changes)
    return [
        str(len(ordered)),
        f"{sum(change > 0.01 for change in ordered) / len(ordered):.0%}",
        number(ordered[int(0.99 * len(ordered))]),
        number(ordered[-1]),
        number(max(found.moved)) if found.moved else MISSING,
    ]


def report(folder: Path) -> Iterator[str]:
    rows: list[list[str]] = []
    changes: list[list[str]] = []
    for pair, (arm, arguments) in product(NAMES, COMPARED.items()):
        texts, name = Lines(file_of(folder, pair, *arguments)).texts, SPECULATING.get(arm, "")
        plain, exact = (Lines(file_of(folder, pair, "bfloat16", each)).texts for each in ("ar", "reference"))
        full, plain_full = (Lines(file_of(folder, pair, "float32", each)).texts for each in (name, "ar"))
        if both := full.keys() & plain_full.keys():
            differ = sum(full[each].tokens != plain_full[each].tokens for each in both)
            yield f"float32, {pair}, {arm}: {differ} of {len(both)} texts differ"
        for kind in (HELD_OUT, RANDOM):
            if (found := compare(plain, texts, exact, kind)).texts:
                lengths = [number(accept_length(each, kind)) for each in (texts, full)]
                rows.append([pair, kind, arm, *difference_row(found), *lengths])
        if (found := compare(plain, texts, exact, "")).texts:
            changes.append([pair, arm, *change_row(found)])
    yield Table("", "", DIFFERENCES, rows).markdown()
    yield Table("", "", CHANGES, changes).markdown()


def main(
    pairs: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(NAMES),
    arms: Annotated[str, typer.Option(help="As for sglang-dflash bench; ar comes first.")] = MODES,
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "bfloat16,float32",
    prompts: Annotated[int, typer.Option(help="Held-out conversations.")] = 200,
    random: Annotated[int, typer.Option(help="Prompts of random tokens.")] = 48,
    new_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 128,
    out: Annotated[Path, typer.Option(help="Folder of the texts.")] = Path("results/bfloat16"),
    flags: Annotated[str, typer.Option(help="Additional flags of every server, separated by spaces.")] = "",
) -> None:
    """Measure the texts that the folder lacks, and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    for pair in pairs.split(","):
        asked = named_prompts(pair, prompts, random)
        for dtype in dtypes.split(","):
            for arm in arms.split(","):
                measure(pair, arm, dtype, out, asked, new_tokens, flags.split())
    typer.echo(describe_hardware(hardware()))
    typer.echo("\n\n".join(report(out)))


if __name__ == "__main__":
    typer.run(main)
