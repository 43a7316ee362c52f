"""Predicted memory of the five cards' commands on three GPUs: ``python -m sglang_dflash_lab.measure.card_memory``.

The numbers are those of ``sglang-dflash check TARGET DRAFTER FLAGS --gpu GPU``; no server is started.
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace

from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.check.pools import fit
from sglang_dflash.check.report import preflight
from sglang_dflash.hooks.flags import modernise_argv
from sglang_dflash.plan.division import STATE_SHARE
from sglang_dflash_lab.tables import MISSING, Table
from tests.support.cards import FOLDER, NAMES, card

_BLACKWELL = ("--attention-backend", "trtllm_mha")  # as launch/serve.sh advises for the cards that are for Hopper
_HOPPER = ("--attention-backend", "fa3", "--speculative-draft-attention-backend", "fa3")


def row(name: str, gpu: str, *flags: str) -> list[str]:
    """Return the table's row of one card on one GPU, with flags added to the card's."""
    pair = {"target": str(FOLDER / name / "target"), "drafter": str(FOLDER / name / "drafter")}
    backends = _BLACKWELL if gpu == "b200" else _HOPPER
    args = parse(modernise_argv([*card(name).arguments_for(*pair.values()), *backends, *flags])[0], **pair)[0]
    memory = preflight(args, GPUS[gpu]).memory
    if memory is None or not memory.served.running:
        return [name, gpu, *[MISSING] * 5]
    served = memory.served
    sglangs = fit(replace(served.sizing, state_share=STATE_SHARE), memory.static_bytes)
    return [
        name,
        gpu,
        "replayed" if served.replay else "kept",
        f"{served.running} ({sglangs.running}) of {served.sizing.max_running}",
        f"{served.tokens:,} ({sglangs.tokens:,})",
        str(served.sizing.state_share) if served.replay else f"{STATE_SHARE}",
        f"{memory.fraction}",
    ]


def table(*flags: str) -> Table:
    columns = ["card", "GPU", "states", "requests at once", "K/V tokens", "ratio", "static fraction"]
    caption = "In brackets: SGLang's own worker, which keeps states at a ratio of 0.9."
    return Table("The cards' memory", caption, columns, [row(name, gpu, *flags) for name in NAMES for gpu in GPUS])


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    print(table().markdown())
