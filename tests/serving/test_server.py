"""Stock SGLang's own commands on the CPU platform: start, answer, survive, stop, refuse."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from sglang_dflash.pairs import target_path
from tests.support.servers import SGLANG_SERVE, Server, run_to_exit, running

pytestmark = pytest.mark.engine

QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does Tom have now?"}]


def arguments() -> tuple[str, ...]:
    return ("--model-path", str(target_path("tiny-hybrid")), "--dtype", "float32")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``sglang serve``; the other files start ``python -m sglang.launch_server``."""
    with running(tmp_path_factory.mktemp("server"), *arguments(), launcher=SGLANG_SERVE) as server:
        yield server


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_chat_completion_plain_and_streamed_agree(server: Server) -> None:
    plain = client(server).chat.completions.create(model="m", messages=QUESTION, temperature=0, max_tokens=48)
    chunks = client(server).chat.completions.create(
        model="m", messages=QUESTION, temperature=0, max_tokens=48, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == plain.choices[0].message.content
    assert len(pieces) > 2
    assert plain.usage is not None
    assert plain.usage.completion_tokens > 0


def test_survives_a_client_that_disconnects(server: Server) -> None:
    body = {"text": "Once", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "stream": True}
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=60) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 60
    while running_requests(server) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running_requests(server) == 0, "the abandoned request still runs"
    after = server.post("/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 4}})
    assert after.status_code == 200


def running_requests(server: Server) -> int:
    loads = server.get("/v1/loads").json()
    return sum(load["num_running_reqs"] for load in loads["loads"])


def test_stops_on_sigterm_leaving_no_process(server: Server) -> None:
    """The last test of this server."""
    answer = client(server).chat.completions.create(model="m", messages=QUESTION, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content
    family = server.family()
    assert len(family) > 2, "expected a scheduler and a detokenizer beside the HTTP process"
    server.process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.fixture()
def broken_copy(tmp_path: Path) -> Path:
    """A copy of a checkpoint whose config a test may edit."""
    return Path(shutil.copytree(target_path("tiny-hybrid"), tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_one_clear_error(outcome: tuple[int, str], *words: str) -> None:
    code, output = outcome
    assert code != 0
    lines = [line for line in output.splitlines() if "sglang-dflash:" in line]
    assert len(lines) == 1, output[-3000:]
    for word in (*words, "Expected:", "Remedy:"):
        assert word in lines[0]
    assert "Load weight begin" not in output


def test_missing_model_path_is_refused() -> None:
    assert_one_clear_error(run_to_exit("--model-path", "/no/such/folder"), "/no/such/folder")


def test_quantised_checkpoint_is_refused(broken_copy: Path) -> None:
    edit_config(broken_copy, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    assert_one_clear_error(run_to_exit("--model-path", str(broken_copy)), "fp8")


def test_architecture_without_a_cpu_path_is_refused(tmp_path: Path) -> None:
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = run_to_exit("--model-path", str(tmp_path), "--skip-tokenizer-init")
    assert_one_clear_error(outcome, "DeepseekV2ForCausalLM", "MLA")


def test_unknown_attention_backend_is_refused() -> None:
    code, output = run_to_exit(*arguments(), "--attention-backend", "fa33")
    assert code != 0
    assert "invalid choice: 'fa33'" in output
