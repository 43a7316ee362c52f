"""Tables of pairs and GPUs, as ``sglang-dflash check`` predicts them.

``python -m tests.house.cards`` rewrites the tables of README.md and docs/setup.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash.launch.division import TOKENS_PER_REQUEST
from tests.launch.commands import FOLDER as COMMANDS
from tests.support.cards import FOLDER as CARDS

ROOT = Path(__file__).parents[2]
HUB = "https://huggingface.co"
GPUS = {
    "rtx4090": "RTX 3090, 4090 24 GB", "rtx5090": "RTX 5090 32 GB", "l40s": "L40S 48 GB", "h100": "H100 80 GB",
    "rtx-pro-6000": "RTX PRO 6000 96 GB", "dgx-spark": "DGX Spark 128 GB", "h200": "H200 141 GB",
}  # fmt: skip


class Row(NamedTuple):
    """A published pair. ``files``: configurations of target and drafter; ``guessed``: a size or layout of them."""

    target: str
    drafter: str
    files: tuple[str, str]
    guessed: bool


# Whether a size or layout is guessed (~), target, drafter, and the folders of their configurations, in COMMANDS or of
# the target's card. "@April" is a revision that the hub no longer serves.
_PAIRS = """
- RadixArk/Qwen3.8-27B-NVFP4 incoai/Qwen3.8-27B-DFlash2 qwen38-27b-nvfp4 qwen38-27b-dflash2
~ Qwen/Qwen3.8-27B-FP8 incoai/Qwen3.8-27B-DFlash2 qwen38-27b-fp8 qwen38-27b-dflash2
~ Qwen/Qwen3.8-27B incoai/Qwen3.8-27B-DFlash2 qwen38-27b qwen38-27b-dflash2
- Qwen/Qwen3.6-27B z-lab/Qwen3.6-27B-DFlash card card
~ Qwen/Qwen3.5-27B z-lab/Qwen3.5-27B-DFlash card card
- Qwen/Qwen3.6-35B-A3B z-lab/Qwen3.6-35B-A3B-DFlash card ../trainers/zlab-later
- Qwen/Qwen3.6-35B-A3B z-lab/Qwen3.6-35B-A3B-DFlash@April card card
~ Qwen/Qwen3.6-35B-A3B incoai/Qwen3.6-35B-A3B-DFlash2 card qwen36-35b-dflash2
- ornith-ai/Ornith-1.5-35B-A3B jzinno/Ornith-1.5-35B-A3B-DFlash2 ornith15-35b-a3b ornith15-35b-dflash2
~ ornith-ai/Ornith-1.5-122B-NVFP4 incoai/Ornith-1.5-122B-DFlash2 ornith15-122b-nvfp4 ornith15-122b-dflash2
- Qwen/Qwen3-Coder-30B-A3B-Instruct z-lab/Qwen3-Coder-30B-A3B-DFlash qwen3-coder-30b-a3b qwen3-coder-30b-dflash
~ Qwen/Qwen3.5-9B z-lab/Qwen3.5-9B-DFlash ornith15-9b qwen35-9b-dflash
- Qwen/Qwen3-8B z-lab/Qwen3-8B-DFlash-b16 qwen3-8b qwen3-8b-dflash
- Qwen/Qwen3.5-4B z-lab/Qwen3.5-4B-DFlash card card
- openai/gpt-oss-20b z-lab/gpt-oss-20b-DFlash gpt-oss-20b gpt-oss-20b-dflash
- openai/gpt-oss-120b z-lab/gpt-oss-120b-DFlash gpt-oss-120b gpt-oss-120b-dflash
~ google/gemma-4-31B-it z-lab/gemma-4-31B-it-DFlash gemma4-31b gemma4-31b-dflash
"""


def _row(guessed: str, target: str, drafter: str, *folders: str) -> Row:
    of_card = (str(CARDS / target.rpartition("/")[2] / part) for part in ("target", "drafter"))
    files = (own if name == "card" else str(COMMANDS / name) for name, own in zip(folders, of_card, strict=True))
    return Row(target, drafter, tuple(files), guessed == "~")


PAIRS = [_row(*line.split()) for line in _PAIRS.strip().splitlines()]
SPARK = "--mem-fraction-static 0.8 --kv-cache-dtype fp8_e4m3 --attention-backend flashinfer --chunked-prefill-size 2048"
# GPU, target, flags that its users set, and the evidence
ONE_CARD = [
    ("rtx4090", "openai/gpt-oss-20b", "", "predicted"),
    ("rtx4090", "Qwen/Qwen3.5-9B", "", "predicted"),
    ("rtx5090", "RadixArk/Qwen3.8-27B-NVFP4", "", "predicted"),
    ("dgx-spark", "RadixArk/Qwen3.8-27B-NVFP4", SPARK, "predicted"),
    ("h100", "Qwen/Qwen3.8-27B-FP8", "", "predicted"),
    ("h200", "Qwen/Qwen3.5-27B", "", "predicted"),
    ("h200", "Qwen/Qwen3.5-4B", "", "started"),
]


def row_of(target: str) -> Row:
    return next(row for row in PAIRS if row.target == target)


@cache
def printed(target: str, drafter: str, *flags: str) -> str:
    return CliRunner().invoke(app, ["check", target, drafter, *flags]).stdout


def served(row: Row, *flags: str) -> tuple[str, int, int]:
    """Return the flags that ``check`` adds, the requests of 8,192 tokens (or a shorter one) and of one conversation."""
    memory = json.loads(printed(*row.files, "--json", *flags))["memory"]
    found, added = memory["served"], ""
    if not found["running"]:
        here = [each for each in memory["advice"] if each["gpus"] == 1]
        if not here:
            return "", 0, 0
        context = found["sizing"]["context"]
        found = max(here, key=lambda each: each["running"])
        added, found = found["flag"], {**found, "longest": min(context, found["tokens"])}
    requests = min(found["running"], max(1, found["tokens"] // TOKENS_PER_REQUEST))
    return added, requests, found["longest"]


def pairs() -> Iterator[str]:
    yield f"| target | drafter | {' | '.join(GPUS.values())} |"
    yield "|---" * (2 + len(GPUS)) + "|"
    for row in PAIRS:
        drafter, _, revision = row.drafter.partition("@")
        owner, kind = drafter.partition("/")[0], "DFlash2" if "DFlash2" in drafter else "DFlash"
        cells = [f"{'~ ' * row.guessed}[{row.target.partition('/')[2]}]({HUB}/{row.target})"]
        cells += [f"[{owner}, {kind}]({HUB}/{drafter}){f', {revision}' * bool(revision)}"]
        for gpu in GPUS:
            added, requests, _ = served(row, "--gpu", gpu)
            cells.append(f"{requests or '–'}{'*' if added else ''}")
        yield f"| {' | '.join(cells)} |"


def one_card() -> Iterator[str]:
    yield "| card | target | flags | requests of 8,192 tokens | or one conversation | evidence |"
    yield "|---" * 6 + "|"
    for gpu, target, flags, evidence in ONE_CARD:
        added, requests, tokens = served(row_of(target), "--gpu", gpu, *flags.split())
        given = f"`{' '.join(filter(None, [flags, added]))}`" if flags or added else "none"
        words = evidence if evidence == "predicted" else f"[{evidence}](internals/gpu.md#step-times), random weights"
        yield f"| {GPUS[gpu]} | `{target}` | {given} | {requests} | {tokens:,} tokens | {words} |"


TABLES = {ROOT / "README.md": ("pairs", pairs), ROOT / "docs/setup.md": ("cards", one_card)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for page, (name, table) in TABLES.items():
        text, mark = page.read_text(), f"<!-- cards: {name} -->\n"
        before, _, rest = text.partition(mark)
        old = re.match(r"(\|.*\n)*", rest)
        assert old is not None
        page.write_text(before + mark + "\n".join(table()) + "\n" + rest[old.end() :])


if __name__ == "__main__":
    main()
