"""Record how far drafts and copies are accepted at every position of real answers: ``python -m tests.width.record``.

A CPU server drafts at each position of each greedy answer, once per width; a plugin keeps the blocks and then spoils
them, so that every step commits one token. An accept length depends on the text so far and the width, not on earlier
blocks. So a replay may start a block of any width at any position, and positions shift as they would on a server. It
is exact but for batches: the server's batch, which changes no accept length in float32.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs import drafter_path
from tests.support.generation import flush, generate_all
from tests.support.prompts import message_ids, random_prompts
from tests.support.servers import RANDOM_WIDTHS, dflash_server, with_plugin

FOLDER = Path(__file__).parents[1] / "fixtures" / "traffic"
PAIR, USERS, TOKENS = "tiny-hybrid", 8, 72
# Traffic: drafter, tasks (none: random tokens, on which the target babbles), prompts of each
TRAFFICS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "chat": ("weak", ("wild",), 24),
    "edits": ("weak", ("edit-json", "edit-code", "edit-chat"), 8),
    "repeats": ("noisy", ("repeat",), 24),
    "easy": ("good", ("questions",), 24),
    "questions": ("noisy", ("questions",), 24),
    "babble": ("mismatched", (), 16),
}
DIGITS = "0123456789abcdefg"


def record(server: Any, folder: Path, inputs: Sequence[Sequence[int]], widths: Sequence[int], **sampling: Any) -> Any:
    """Return each request's strings by position: a digit per position, of the match length and of each width's lens."""
    passes = []
    for width in widths:
        (folder / "width").write_text(str(width))
        (folder / "acceptance.jsonl").write_text("")
        flush(server)
        found = generate_all(server, inputs, USERS, TOKENS, sampling_params=sampling)
        lines = [json.loads(line) for line in (folder / "acceptance.jsonl").read_text().splitlines()]
        passes.append([_by_position(lines, answer, prompt) for answer, prompt in zip(found, inputs, strict=True)])
    requests = []
    for by_width in zip(*passes, strict=True):
        matches = {match for _, match in by_width}
        assert len(matches) == 1, f"matches differ between widths: {matches}"
        lens = {str(width): text for width, (text, _) in zip(widths, by_width, strict=True)}
        requests.append({"match": matches.pop(), **lens})
    return requests


def _by_position(lines: list[dict[str, Any]], answer: Any, prompt: Sequence[int]) -> tuple[str, str]:
    text, lens, matches = [*prompt, *answer.tokens], {}, {}
    for line in lines:
        if line["rid"] == answer.meta["id"] and line["position"] < len(text) - 1:
            start, block = line["position"], line["block"]
            assert block[0] == text[start]
            right = 1
            while right < len(block) and start + right < len(text) and block[right] == text[start + right]:
                right += 1
            lens[start], matches[start] = right, line["match"]
    assert sorted(lens) == list(range(len(prompt), len(text) - 1)), "a position has no step"
    return tuple("".join(DIGITS[kept[start]] for start in sorted(kept)) for kept in (lens, matches))


def record_traffic(traffic: str) -> None:
    drafter, tasks, number = TRAFFICS[traffic]
    asked = [messages for task in tasks for messages in load(task, number)]
    inputs = message_ids(PAIR, asked) if tasks else random_prompts(PAIR, number)
    mask = json.loads((drafter_path(PAIR, drafter) / "config.json").read_text())["dflash_config"]["mask_token_id"]
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "width").write_text("16")
        plugin = {**with_plugin(folder, "acceptance"), "SGLANG_DFLASH_TEST_REFUSED": str(mask)}
        with dflash_server(PAIR, folder, *RANDOM_WIDTHS, drafter=drafter, **plugin) as server:
            found = record(server, folder, inputs, (2, 4, 8, 16), ignore_eos=not tasks)
    (FOLDER / f"{traffic}.json").write_text(json.dumps(found, indent=0) + "\n")
    print(traffic, drafter, sum(len(each["match"]) for each in found), "positions", flush=True)


if __name__ == "__main__":
    ArgumentParser(prog="python -m tests.width.record", description=__doc__).parse_args()
    for traffic in TRAFFICS:
        record_traffic(traffic)
