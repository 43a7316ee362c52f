"""The command: see the package."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_dflash_lab.pairs import target_path
from tests.soak.catalogue import PAIR, SEEDED, Entry, catalogue
from tests.soak.load import answer_of, drive
from tests.soak.verdict import Promise, promises, text, wrong_answers
from tests.support.servers import FEATURES, Server, dflash_server, plain_server, with_plugin

ENTRIES = 320
AT_A_TIME = 8  # of the reference's answers
# K/V for one of the longest requests and a few short ones; eight may run, and more are begun than can end.
SCARCE = (
    *("--max-total-tokens", "2304", "--max-running-requests", "8", "--chunked-prefill-size", "512"),
    *("--schedule-conservativeness", "0.05"),
)
ADAPTIVE = ("--speculative-adaptive", "--mamba-radix-cache-strategy", "extra_buffer", "--enable-metrics")
WINDOW = ("--speculative-draft-window-size", "512")


def soak(requests: int, out: Path, entries: int = ENTRIES, drafter: str = "noisy") -> list[Promise]:
    """Send the requests, judge the answers, and write the report to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    asked = catalogue(min(entries, requests))
    expected = answers_of_reference(asked, out)
    arguments, plugin = (*SCARCE, *ADAPTIVE, *WINDOW), with_plugin(out, "pools", "history")
    with dflash_server(PAIR, out, *arguments, base=FEATURES, drafter=drafter, block=32, **plugin) as server:
        load = asyncio.run(drive(server, asked, requests, str(target_path(PAIR))))
        retractions = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", server.log)))
        found = list(promises(load, asked, expected, pools_at_rest(server), retractions))
    command = f"python -m tests.soak --requests {requests}" + (f" --drafter {drafter}" if drafter != "noisy" else "")
    (out / "soak.md").write_text(text(command, load, asked, found))
    wrong = [
        {**asdict(outcome), "body": asked[outcome.entry].body, "expected": expected[outcome.entry]}
        for outcome in wrong_answers(load, expected)
    ]
    (out / "wrong.json").write_text(json.dumps(wrong, indent=1))
    return found


def answers_of_reference(entries: Sequence[Entry], out: Path) -> list[Any]:
    """Return plain decoding's answers; with a seed, which SGLang ignores here, those of our worker at width 1."""
    steps_of_one = out / "widths.json"
    steps_of_one.write_text(json.dumps({"policy": "random", "widths": [1]}))
    seeded = ("--speculative-adaptive", "--speculative-adaptive-config", str(steps_of_one))
    with (
        plain_server(PAIR, out, base=FEATURES) as plain,
        dflash_server(PAIR, out, *seeded, base=FEATURES, block=2) as one,
        ThreadPoolExecutor(AT_A_TIME) as pool,
    ):
        return list(pool.map(lambda entry: answer(one if entry.kind == SEEDED else plain, entry), entries))


def answer(server: Server, entry: Entry) -> Any:
    response = server.post(entry.route, entry.body)
    assert response.status_code == 200, response.text
    return answer_of(entry, response)


def pools_at_rest(server: Server) -> dict[str, int]:
    """Return the slots that are lost once nothing runs."""
    assert server.get("/health_generate").status_code == 200
    lost: dict[str, int] = server.get("/server_info").json()["internal_states"][0]["pools"]
    return lost


def main(
    requests: int = 10000,
    out: Annotated[Path, typer.Option(help="Folder of the report and the servers' logs.")] = Path("results/soak"),
    drafter: Annotated[str, typer.Option(help="Drafter of the pair.")] = "noisy",
) -> None:
    """Exit code 1 if a promise was broken."""
    found = soak(requests, out, drafter=drafter)
    typer.echo((out / "soak.md").read_text())
    sys.exit(not all(promise.held for promise in found))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
