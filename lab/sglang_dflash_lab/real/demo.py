"""``make demo-real``: three edits and a question to a published model, with plain decoding and with copies."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import typer
from rich.console import Console
from rich.markup import escape

from sglang_dflash.check import user_errors
from sglang_dflash_lab.bench.load import growth, worker_state
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.server import Launch, running
from sglang_dflash_lab.bench.tasks import Messages, read_marked
from sglang_dflash_lab.tables import Table, wide_console

PROMPTS = read_marked(Path(__file__).with_name("prompts.txt"))
SHOWN = (2, 10, 17, 20)  # of PROMPTS: a text, a program, a page, a question
MAX_TOKENS = 160
COPIES_ALONE = ("--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", "16")


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int
    seconds: float
    accept_length: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def demo(console: Console, target: Path, logs: Path) -> None:
    asked = [PROMPTS[number] for number in SHOWN]
    served = {}
    for name, flags in (("plain", ()), ("copies", COPIES_ALONE)):
        limits = ("--dtype", "float32", "--max-running-requests", "4")
        launch = Launch(("--model-path", str(target), *limits, *flags))
        console.print(f"\n[bold]$[/bold] {escape(launch.describe())}")
        with running(launch, logs / f"{name}.log") as url:
            ask(url, PROMPTS[-1][1], 8)
            served[name] = [ask(url, messages, MAX_TOKENS) for _, messages in asked], peak_gib()
    (plain, plain_peak), (copied, copied_peak) = served["plain"], served["copies"]
    rows = []
    for (kind, messages), reference, answer in zip(asked, plain, copied, strict=True):
        same = answer.text == reference.text
        console.print(f"\n[bold]user[/bold]  {escape(messages[-1]['content'])}")
        console.print(f"[bold]model[/bold] {escape(answer.text)}")
        console.print(f"[dim]{'identical' if same else 'without speculation: ' + escape(reference.text)}[/dim]")
        speeds = f"{reference.speed:.1f}", f"{answer.speed:.1f}", f"{answer.speed / reference.speed:.2f}x"
        rows.append([kind, str(answer.tokens), *speeds, f"{answer.accept_length:.2f}", "yes" if same else "no"])
    rows.append(["peak memory, GiB", "", f"{plain_peak:.1f}", f"{copied_peak:.1f}", "", "", ""])
    caption = f"Tokens per second of one user, prefill included; float32, {describe_hardware(hardware())}"
    columns = ["prompt", "tokens", "plain", "copies", "speed-up", "accept length", "identical"]
    console.print()
    Table("SmolLM2-135M-Instruct", caption, columns, rows).print(console)


def ask(url: str, messages: Messages, max_tokens: int) -> Answer:
    """Return the server's greedy answer and its accept length (1 without speculation)."""
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    before, start = worker_state(url), time.perf_counter()
    answered = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600, trust_env=False)
    reply: Any = answered.raise_for_status().json()
    seconds, counted = time.perf_counter() - start, growth(before, worker_state(url))
    blocks = {int(length): count for length, count in counted.get("blocks_by_accept_length", {}).items()}
    accept = sum(length * count for length, count in blocks.items()) / sum(blocks.values()) if blocks else 1.0
    return Answer(reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"], seconds, accept)


def peak_gib() -> float:
    """Return the children's summed peak resident memory; shared pages count per process."""
    statuses = [Path(f"/proc/{each.pid}/status").read_text() for each in psutil.Process().children(recursive=True)]
    peaks = [line.split()[1] for status in statuses for line in status.splitlines() if line.startswith("VmHWM")]
    return sum(map(int, peaks)) / 2**20


def main(target: Path, logs: Path) -> None:
    """Serve TARGET with plain decoding and with copies; write the servers' logs to LOGS."""
    with user_errors():
        demo(wide_console(), target, logs)


if __name__ == "__main__":
    typer.run(main)
