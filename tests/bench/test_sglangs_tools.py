"""SGLang's own load and evaluation tools against DFLASH: their figures are the server's, or the page names the error.

``docs/benchmark.md#sglangs-tools`` has a row for each.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash_lab.pairs import target_path
from tests.bench.test_other_tools import DEMO, MATH, MODEL, PAIR, QUESTIONS, Counted, question, run, write
from tests.launch import entries
from tests.support.parse_commands import outcomes
from tests.support.servers import Server, dflash_server, draft_arguments, target_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

# The command line of a server of the smallest pair, and its answers' length.
DENSE = (*target_arguments(entries.PAIR, ("--dtype", "float32")), *draft_arguments(entries.PAIR))
SERVES = "serves DFLASH: "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with dflash_server(PAIR, tmp_path_factory.mktemp("dflash"), base=DEMO) as served:
        yield served


def tool(folder: Path, module: str, *arguments: str) -> str:
    return run(folder, sys.executable, "-m", module, *arguments)


def figures(folder: Path, name: str = "out.jsonl") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text().splitlines()[-1])
    return found


CHAT = ("sglang-oai-chat", "vllm-chat", "lmdeploy-chat")


@pytest.mark.parametrize("backend", ["sglang", "sglang-native", "sglang-oai", "vllm", "lmdeploy", *CHAT])
def test_serving(backend: str, server: Server, tmp_path: Path) -> None:
    """A stream of completions has no usage: the tool counts the requested tokens."""
    asked = [[{"role": "user", "content": question(p)}, {"content": p.answer}] for p in QUESTIONS[:8]]
    path = write(tmp_path, "custom.jsonl", [{"conversations": turns} for turns in asked])
    counted = Counted(server)
    # The former name has the same program.
    module = "sglang.bench_serving" if backend == "sglang-native" else "sglang.benchmark.serving"
    tool(
        tmp_path,
        *(module, "--base-url", server.url, "--tokenizer", MODEL, "--model", MODEL, "--backend", backend),
        *("--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "8", "--max-concurrency", "4"),
        *("--warmup-requests", "0", "--disable-ignore-eos", "--output-file", "out.jsonl"),
        # Else the prompt is bare text, which the pair answers with the end at once: counted as the requested tokens.
        *(() if backend in CHAT else ("--apply-chat-template",)),
    )
    found = figures(tmp_path)
    assert found["completed"] == 8
    counts = backend not in ("sglang-oai", "vllm", "lmdeploy")
    assert not counts or found["total_output_tokens"] == counted.tokens
    # Fewer steps than a log interval has: SGLang alone would report none.
    accept_length = pytest.approx(counted.accept_length) if backend.startswith("sglang") else None
    assert found["accept_length"] == accept_length
    if counts and backend.startswith("sglang"):
        assert found["mean_itl_ms"] < 2 * found["mean_tpot_ms"]  # by tokens, though a chunk has many


ONE_BATCH = (
    *("--batch-size", "2", "--input-len", "32", "--output-len", "48", "--result-filename", "out.jsonl"),
    *("--skip-warmup", "--fixed-prompt-file", "prompt", "--apply-chat-template"),  # the others ask the hub
)


def test_one_batch_server(server: Server, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(question(MATH[0]))
    counted = Counted(server)
    address = ("--base-url", server.url, "--model-path", MODEL, "--dtype", "float32")
    tool(tmp_path, "sglang.benchmark.one_batch_server", *address, *ONE_BATCH)
    found = figures(tmp_path)
    assert found["total_output_tokens"] == counted.tokens == 2 * 48
    assert found["acc_length"] == round(counted.accept_length, 2) > 1


def test_one_batch_server_that_starts_its_server(tmp_path: Path) -> None:
    """It resolves the arguments and spawns the server, before any process loads plugins."""
    (tmp_path / "prompt").write_text(question(MATH[0]))
    output = tool(tmp_path, "sglang.benchmark.one_batch_server", *DENSE, *ONE_BATCH)
    assert SERVES in output and figures(tmp_path)["acc_length"] > 1


def test_offline_throughput(tmp_path: Path) -> None:
    """It resolves the arguments before ``Engine`` loads plugins."""
    turns = [[{"from": "human", "value": question(p)}, {"from": "gpt", "value": p.answer}] for p in QUESTIONS[:4]]
    (tmp_path / "data.json").write_text(json.dumps([{"conversations": each} for each in turns]))
    data = ("--dataset-path", "data.json", "--num-prompts", "4", "--sharegpt-output-len", "48", "--skip-warmup")
    output = tool(tmp_path, "sglang.benchmark.offline_throughput", *DENSE, *data, "--result-filename", "out.jsonl")
    assert SERVES in output and figures(tmp_path)["total_output_tokens"] == 4 * 48


def test_one_batch_runs_the_target_alone(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text(question(MATH[0]))
    # its timed runs draw tokens below 10,000, which the pair has not
    given = ("--correctness-test", "--output-len", "8", "--prompt-filename", "prompts")
    output = tool(tmp_path, "sglang.benchmark.one_batch", *DENSE, *given)
    assert SERVES not in output and "DFlashDraftModel" not in output
    assert "Prompt 0" in output


@pytest.mark.parametrize("module", ["offline_throughput", "one_batch", "one_batch_server"])
def test_an_old_flag_of_a_card_is_unknown_to_the_tools_that_start_sglang(module: str, tmp_path: Path) -> None:
    """They build their parser before any process loads plugins."""
    old = ("--mamba-scheduler-strategy", "extra_buffer")
    with pytest.raises(AssertionError, match="unrecognized arguments: --mamba-scheduler-strategy"):
        tool(tmp_path, f"sglang.benchmark.{module}", *DENSE, *old)


# What `benchmark/dflash/bench_dflash_gsm8k_sweep.py` of SGLang's repository passes to its servers.
SWEEP = (
    *("--trust-remote-code", "--attention-backend", "fa3", "--tp-size", "1", "--dtype", "bfloat16"),
    *("--mem-fraction-static", "0.75", "--max-running-requests", "64"),
    *("--cuda-graph-bs", *map(str, range(1, 33)), "--cuda-graph-max-bs", "32"),
    *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "drafter"),
)


def test_the_flags_of_sglangs_dflash_sweep_parse_with_this_package_only(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [("--model-path", str(target_path(PAIR)), *SWEEP)]
    [ours] = outcomes(command, resolve=False)
    assert ours["mem_fraction_static"] == 0.75
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    [stock] = outcomes(command, resolve=False)
    assert "--cuda-graph-bs" in stock["error"]


FEW_SHOT = "--port {port} --parallel 4 --data-path {path} --num-questions 8 --max-new-tokens 64"
RUN_EVAL = (
    "--eval-name gsm8k --base-url http://127.0.0.1:{port} --model {model} --num-threads 4 --gsm8k-data-path {path} "
    "--num-examples 8 --max-tokens 64 --temperature 0"
)


@pytest.mark.parametrize(("module", "given"), [("few_shot_gsm8k", FEW_SHOT), ("run_eval", RUN_EVAL)])
def test_accuracy(module: str, given: str, server: Server, tmp_path: Path) -> None:
    """On questions of the corpus in the form of GSM8K."""
    rows = [{"question": question(p), "answer": f"{p.answer}\n#### {p.expected}"} for p in MATH]
    path, counted = write(tmp_path, "test.jsonl", rows), Counted(server)
    words = given.format(port=server.port, path=path, model=MODEL).split()
    output = tool(tmp_path, f"sglang.test.{module}", *words, "--num-shots", "2")
    names = "Output throughput", "(?:Total l|L)atency"
    [speed], [seconds] = (re.findall(rf"(?m)^{name}: *([\d.]+)", output) for name in names)
    assert float(speed) * float(seconds) == pytest.approx(counted.tokens, rel=0.01)
