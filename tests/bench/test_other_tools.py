"""Other people's tools, unchanged, against a DFLASH server: they report its counts.

``make test-tools`` installs those that are not SGLang's own; a missing tool is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.pairs.corpus import TASKS, Prompt, prompts
from tests.support.generation import flush
from tests.support.servers import Server, dflash_server, worker_info

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

PAIR = "tiny-hybrid"
MODEL = str(target_path(PAIR))
DEMO = ("--dtype", "float32", "--enable-metrics", "--enable-cache-report")
ENVIRONMENTS = Path(__file__).parents[2] / ".cache" / "tools"
BENCHMARK = Path(__file__).parents[2] / "docs/benchmark.md"
QUESTIONS = [prompt for task in TASKS for prompt in prompts(task, n=4, seed=3, shape="single")]
MATH = prompts("math", n=20, seed=3, shape="single")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with dflash_server(PAIR, tmp_path_factory.mktemp("dflash"), base=DEMO) as served:
        yield served


def run(folder: Path, *command: str) -> str:
    """Run a tool in ``folder`` and return its output; it must succeed."""
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def executable(tool: str, name: str) -> str:
    """The tool from its own environment, or from ``PATH``."""
    installed = ENVIRONMENTS / tool / "bin" / name
    found = str(installed) if installed.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: `make test-tools` installs it")
    return found


def write(folder: Path, name: str, rows: list[Any]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


class Counted:
    """The server's counts from now on."""

    def __init__(self, server: Server) -> None:
        flush(server)  # resets SGLang's mean accept length
        self._server = server
        self._before = self._now()

    def _now(self) -> tuple[Counter[int], float]:
        blocks = {int(n): count for n, count in worker_info(self._server)["blocks_by_accept_length"].items()}
        families = text_string_to_metric_families(self._server.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return Counter(blocks), sum(s.value for s in samples if s.name == "sglang:generation_tokens_total")

    @property
    def tokens(self) -> float:
        return self._now()[1] - self._before[1]

    @property
    def accept_length(self) -> float:
        blocks = self._now()[0] - self._before[0]
        return sum(length * count for length, count in blocks.items()) / blocks.total()


def test_aiperf_reports_the_servers_tokens(server: Server, tmp_path: Path) -> None:
    """AIPerf also scrapes every metric; ours have the run's accept lengths."""
    aiperf, url = executable("aiperf", "aiperf"), server.url
    path, counted = write(tmp_path, "prompts.jsonl", [{"text": question(p)} for p in QUESTIONS]), Counted(server)
    run(
        tmp_path,
        *(aiperf, "profile", "--model-names", MODEL, "--tokenizer", MODEL, "--url", url, "--ui", "none"),
        *("--endpoint-type", "chat", "--streaming", "--input-file", str(path), "--custom-dataset-type", "single_turn"),
        *("--request-count", "16", "--concurrency", "4", "--osl", "64", "--extra-inputs", "temperature:0"),
        *("--use-server-token-count", "--artifact-dir", "out"),
    )
    profile = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert profile["request_count"]["avg"] == 16 and profile["request_error_rate"]["avg"] == 0
    assert profile["total_osl"]["avg"] == profile["total_usage_completion_tokens"]["avg"] == counted.tokens
    scraped = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())["metrics"]
    [series] = scraped["sglang_dflash:accept_length"]["series"]
    assert series["stats"]["avg"] == pytest.approx(counted.accept_length)


def local_gsm8k(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a data set of one question, which is loaded in place of the hub's and of a cached one."""
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    (data := folder / "openai" / "gsm8k").mkdir(parents=True)
    write(data, "test.jsonl", [{"question": question(MATH[0]), "answer": MATH[0].answer}])
    config = "configs:\n- config_name: main\n  data_files:\n  - split: test\n    path: test.jsonl"
    (data / "README.md").write_text(f"---\n{config}\n---\n")


def test_the_cards_tasks_are_written_by_the_pages_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = Path(executable("dflash", "dflash")).with_name("python")
    local_gsm8k(tmp_path, monkeypatch)
    [command] = re.findall(r"zlab/bin/python (-c .*)", BENCHMARK.read_text())
    run(tmp_path, "bash", "-c", f"task=gsm8k; {python} {command}")
    [[message]] = load(str(tmp_path / "gsm8k.jsonl"), 8)
    assert message["content"].startswith(question(MATH[0]) + "\n")


def test_dflashs_benchmark_reports_the_servers_tokens(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of z-lab. It reads ``meta_info`` of the response, where SGLang 0.5.23 has one per choice: no accept length."""
    benchmark = executable("dflash", "dflash")
    local_gsm8k(tmp_path, monkeypatch)
    counted = Counted(server)
    given = ("--base-url", server.url, "--dataset", "gsm8k", "--num-prompts", "3", "--max-new-tokens", "64")
    output = run(tmp_path, benchmark, "benchmark", "openai", "--model", MODEL, *given)
    [tokens] = re.findall(r"Output tokens: +(\d+)", output)
    assert counted.tokens == int(tokens) * 4 / 3  # the same question for the warm-up
    assert "Accept length" not in output
