"""Other people's tools, unchanged, against a server of ours: what they read of it is what it counted.

``make test-tools`` installs those that are not SGLang's own; a tool that is not there is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers
from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.pairs.corpus import TASKS, Prompt, prompts
from tests.support.generation import flush
from tests.support.pair_servers import dflash_server, plain_server, worker_info
from tests.support.servers import Server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

PAIR = "tiny-hybrid"
MODEL = str(target_path(PAIR))
# As `launch/serve.sh demo`.
DEMO = ("--dtype", "float32", "--enable-metrics", "--enable-cache-report")
ENVIRONMENTS = Path(__file__).parents[2] / ".cache" / "tools"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "tools"
QUESTIONS = [prompt for task in TASKS for prompt in prompts(task, n=4, seed=3, shape="single")]
MATH = prompts("math", n=20, seed=3, shape="single")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with plain_server(PAIR, tmp_path_factory.mktemp("plain"), base=DEMO) as server:
        yield server


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with dflash_server(PAIR, tmp_path_factory.mktemp("dflash"), base=DEMO) as server:
        yield server


def run(folder: Path, *command: str) -> str:
    """Run a tool in ``folder`` -> what it printed; it must end well."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=900
    )
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
    """A file of JSON lines."""
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


class Counted:
    """What a server counts from now on."""

    def __init__(self, server: Server) -> None:
        flush(server)  # starts SGLang's mean accept length anew
        self._server = server
        self._blocks, self._tokens = self._blocks_now(), self._tokens_now()

    def _blocks_now(self) -> Counter[int]:
        return Counter({int(n): count for n, count in worker_info(self._server)["blocks_by_accept_length"].items()})

    def _tokens_now(self) -> float:
        families = text_string_to_metric_families(self._server.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == "sglang:generation_tokens_total")

    @property
    def tokens(self) -> float:
        return self._tokens_now() - self._tokens

    @property
    def accept_length(self) -> float:
        blocks = self._blocks_now() - self._blocks
        return sum(length * count for length, count in blocks.items()) / blocks.total()


def trace(prompt: Prompt) -> list[dict[str, Any]]:
    """A conversation's questions, one a turn."""
    asked = [message for message in prompt.messages if message["role"] == "user"]
    return [{"messages": [message], "prompt_tokens": 0} for message in asked]


GSP = ("--gsp-num-groups", "2", "--gsp-prompts-per-group", "4", "--gsp-system-prompt-len", "256")


@pytest.mark.parametrize(
    ("dataset", "backend", "options"),
    [
        ("custom", "sglang-oai-chat", ()),
        ("speed-bench", "sglang", ("--speed-bench-category", "mixed", "--speed-bench-output-len", "48")),
        ("agentic-trace", "sglang-oai-chat", ("--sharegpt-output-len", "48")),
        ("generated-shared-prefix", "sglang", (*GSP, "--gsp-question-len", "32", "--gsp-output-len", "24")),
    ],
)
def test_bench_serving(dflash: Server, tmp_path: Path, dataset: str, backend: str, options: tuple[str, ...]) -> None:
    turns = [{"role": "user"}, {"role": "assistant"}]
    custom = [[{**turns[0], "content": question(p)}, {**turns[1], "content": p.answer}] for p in QUESTIONS[:8]]
    speed = [{"category": "mixed", "turns": [question(prompt)]} for prompt in QUESTIONS[:8]]
    traces = [trace(prompt) for prompt in prompts("math", n=2, seed=3, shape="turns")]
    path = {
        "custom": write(tmp_path, "custom.jsonl", [{"conversations": turns} for turns in custom]),
        "speed-bench": write(tmp_path, "speed.jsonl", speed),
        "agentic-trace": write(tmp_path, "trace.json", [{"metadata": {}, "conversations": traces}]),
    }.get(dataset)
    requests = sum(map(len, traces)) if dataset == "agentic-trace" else 8
    counted = Counted(dflash)
    run(
        tmp_path,
        *(sys.executable, "-m", "sglang.benchmark.serving", "--base-url", dflash.url, "--backend", backend),
        *("--dataset-name", dataset, "--tokenizer", MODEL, "--num-prompts", "8", "--max-concurrency", "4"),
        *(("--dataset-path", str(path)) if path else ()),
        *("--disable-ignore-eos", "--warmup-requests", "0", "--output-file", "out.jsonl", *options),
    )
    figures = json.loads((tmp_path / "out.jsonl").read_text())
    assert figures["completed"] == requests
    assert figures["total_output_tokens"] == counted.tokens
    # Fewer steps than a log interval has: SGLang alone would report none.
    assert figures["accept_length"] == pytest.approx(counted.accept_length)
    assert figures["mean_itl_ms"] < 2 * figures["mean_tpot_ms"]  # by tokens, though a chunk holds many


def test_run_eval(plain: Server, dflash: Server, tmp_path: Path) -> None:
    """The same score, from the same answers: its report holds them all."""
    rows = write(tmp_path, "gsm8k.jsonl", [{"question": question(p), "answer": p.answer} for p in MATH])
    reports, printed = [], []
    for server in (plain, dflash):
        printed.append(
            run(
                tmp_path,
                *(sys.executable, "-m", "sglang.test.run_eval", "--base-url", server.url, "--eval-name", "gsm8k"),
                *("--gsm8k-data-path", str(rows), "--num-shots", "4", "--num-threads", "4", "--max-tokens", "96"),
            )
        )
        reports.append(Path(re.search(r"Writing report to (\S+)", printed[-1])[1]).read_text())
    assert reports[0] == reports[1] and reports[0].count("Extracted Answer") == 16
    assert "no per-request spec_accept_length" in printed[0]
    assert float(re.search(r"n=16 mean=([\d.]+)", printed[1])[1]) > 2


def test_openai_client(plain: Server, dflash: Server) -> None:
    """A stream's usage counts tokens, not chunks; log-probabilities come one a token."""
    answers = []
    for server in (plain, dflash):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        asked: dict[str, Any] = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 64}
        asked["messages"] = [{"role": "user", "content": question(MATH[0])}]
        whole = client.chat.completions.create(**asked, logprobs=True)
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        usage = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        assert usage == sorted(usage) and usage[-1] == whole.usage.completion_tokens
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        answers.append((text, usage[-1], [entry.token for entry in whole.choices[0].logprobs.content]))
    assert answers[0] == answers[1]
    assert len(chunks) < usage[-1] / 2


def test_frontend_language(plain: Server, dflash: Server, tmp_path: Path) -> None:
    asked = json.dumps([question(prompt) for prompt in MATH[:3]])
    printed = [run(tmp_path, sys.executable, str(FIXTURES / "ask.py"), server.url, asked) for server in (plain, dflash)]
    states, streamed = zip(*(map(json.loads, lines.splitlines()[-2:]) for lines in printed), strict=True)
    assert states[0] == states[1]
    assert streamed[0] == streamed[1] == states[0][0][0]


def test_aiperf(dflash: Server, tmp_path: Path) -> None:
    """It scrapes every metric; ours hold the run's accept lengths, SGLang's gauge those of the last log interval."""
    tool = executable("aiperf", "aiperf")
    rows = write(tmp_path, "prompts.jsonl", [{"text": question(prompt)} for prompt in QUESTIONS])
    counted = Counted(dflash)
    run(
        tmp_path,
        *(tool, "profile", "--model-names", MODEL, "--tokenizer", MODEL, "--url", dflash.url, "--ui", "none"),
        *("--endpoint-type", "chat", "--streaming", "--input-file", str(rows), "--custom-dataset-type", "single_turn"),
        *("--request-count", "16", "--concurrency", "4", "--osl", "64", "--extra-inputs", "temperature:0"),
        *("--use-server-token-count", "--artifact-dir", "out"),
    )
    profile = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert profile["request_count"]["avg"] == 16 and profile["request_error_rate"]["avg"] == 0
    assert profile["total_osl"]["avg"] == profile["total_usage_completion_tokens"]["avg"] == counted.tokens
    scraped = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())["metrics"]
    (series,) = scraped["sglang_dflash:accept_length"]["series"]
    assert series["stats"]["avg"] == pytest.approx(counted.accept_length)


def test_guidellm(dflash: Server, tmp_path: Path) -> None:
    tool = executable("guidellm", "guidellm")
    rows = write(tmp_path, "prompts.jsonl", [{"prompt": question(p), "output_tokens_count": 48} for p in QUESTIONS])
    counted = Counted(dflash)
    run(
        tmp_path,
        *(tool, "run", "--backend", f"kind=openai_http,target={dflash.url}", "--disable-console-interactive"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"),
        *("--data", f"kind=json_file,path={rows}", "--tokenizer", f"kind=huggingface_auto,model={MODEL}"),
        *("--output", "kind=json,path=out.json"),
    )
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    answered = benchmark["requests"]["successful"]
    assert [request["output_tokens"] for request in answered] == [48] * 16
    assert counted.tokens >= 48 * 16  # it may warm up


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_lm_eval(plain: Server, dflash: Server, tmp_path: Path, kind: str) -> None:
    """The same score as plain decoding, item by item; likelihoods too, where the endpoint has them."""
    tool = executable("lm-eval", "lm_eval")
    chat = kind == "local-chat-completions"
    as_text: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    template = transformers.AutoTokenizer.from_pretrained(MODEL).apply_chat_template
    rows = [
        {
            "asked": question(prompt) if chat else template(list(prompt.messages), **as_text),
            "expected": str(prompt.expected),
            "choices": [MATH[i - shift].answer for shift in range(3)],
        }
        for i, prompt in enumerate(MATH[:16])
    ]
    write(tmp_path, "rows.jsonl", rows)
    tasks = ("math",) if chat else ("math", "choice")
    found = []
    for name, server in (("plain", plain), ("dflash", dflash)):
        endpoint = f"{server.url}/v1/{'chat/' if chat else ''}completions"
        options = () if chat else (f"tokenizer={MODEL}", "max_length=2048")
        run(
            tmp_path,
            *(tool, "--model", kind, "--include_path", str(FIXTURES), "--tasks", ",".join(tasks)),
            *("--model_args", ",".join((f"model={MODEL}", f"base_url={endpoint}", "num_concurrent=4", *options))),
            *("--log_samples", "--output_path", name, *(("--apply_chat_template",) if chat else ())),
        )
        found.append({task: samples(next((tmp_path / name).rglob(f"samples_{task}_*.jsonl"))) for task in tasks})
    by_plain, by_dflash = found
    assert by_dflash["math"] == by_plain["math"] and len(by_plain["math"]) == 16
    assert any(right for right, _ in by_plain["math"])
    for mine, theirs in zip(by_dflash.get("choice", []), by_plain.get("choice", []), strict=True):
        assert mine[0] == theirs[0] == 1
        assert [float(x) for [[x, _]] in mine[1]] == pytest.approx([float(x) for [[x, _]] in theirs[1]], abs=1e-3)


def samples(path: Path) -> list[tuple[float, Any]]:
    """Score and responses of every item, in order."""
    logged = sorted(map(json.loads, path.read_text().splitlines()), key=lambda item: item["doc_id"])
    return [(item.get("exact_match", item.get("acc")), item["resps"]) for item in logged]
