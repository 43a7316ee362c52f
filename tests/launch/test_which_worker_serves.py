"""Which worker class SGLang receives, and for which launches."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import sglang.srt.models
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash import enter
from sglang_dflash.check.flags import parse
from sglang_dflash.check.machine import GPUS
from sglang_dflash.check.report import preflight
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch import resolution as hooks_launch
from sglang_dflash.launch.device import CPU, Device
from sglang_dflash.launch.plan import Decision, attach_decision, decision_of
from sglang_dflash.launch.settings import SWITCH
from sglang_dflash.launch.which_worker import LOCAL_EMBEDDING
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.launch.commands import FOLDER as COMMANDS
from tests.launch.test_findings import AMD
from tests.support.configs import serving_plan, settings, target

pytestmark = pytest.mark.sglang


def test_the_worker_that_the_launch_decided_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dflash.worker.worker import DFlashWorker

    monkeypatch.setattr(enter, "enter_scheduler", lambda plan: None)
    for decision, worker in ((Decision(reason="ROCm"), int), (Decision(serving_plan()), DFlashWorker)):
        attach_decision(args := SimpleNamespace(nnodes=1), decision)  # type: ignore[arg-type]
        assert enter.create_worker(lambda *_: int, SpeculativeAlgorithm.DFLASH, args) is worker


def test_auto_is_replaced_before_sglang_reads_the_path_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = SimpleNamespace(**vars(settings().arguments), read=[])
    args.model_path, args.speculative_draft_model_path = "RadixArk/Qwen3.8-27B-NVFP4", "auto"
    monkeypatch.setattr(hooks_launch, "resolving_view", lambda args: args)
    monkeypatch.setattr(hooks_launch, "declare_resolution", lambda args, _, **changes: vars(args).update(changes))
    monkeypatch.setattr(hooks_launch, "this_device", lambda _: GPUS["h200"])
    monkeypatch.setenv(SWITCH, "builtin")  # SGLang's worker is given the drafter too
    with caplog.at_level("INFO"):
        hooks_launch.after_model_paths(args, lambda args: args.read.append(args.speculative_draft_model_path))
    assert args.read == ["incoai/Qwen3.8-27B-DFlash2"]
    assert [line for line in caplog.messages if "auto is incoai/Qwen3.8-27B-DFlash2" in line] == caplog.messages[:1]
    args.model_path, args.speculative_draft_model_path = "Qwen/Qwen3.8-28B", "auto"
    with pytest.raises(DFlashError, match="knows no drafter for Qwen/Qwen3.8-28B.* such as .*Qwen/Qwen3.8-27B,"):
        hooks_launch.after_model_paths(args, lambda _: None)


def launch(
    monkeypatch: pytest.MonkeyPatch, gpu: Device, target: str, drafter: str | None = None
) -> tuple[list[str], Decision]:
    """The warnings of a launch whose resolution ends, and what it decided."""
    args = SimpleNamespace(**vars(settings().arguments))
    args.model_path, args.device = target, "cuda"
    args.speculative_draft_model_path = drafter or str(drafter_path("tiny-dense", "good"))
    monkeypatch.setattr("sglang_dflash.launch.resolution.this_device", lambda _: gpu)
    for name in ("refuse_without_accelerator", "check_sglang"):
        monkeypatch.setattr(f"sglang_dflash.launch.resolution.{name}", lambda: None)
    logged = list[str]()
    monkeypatch.setattr(hooks_launch.logger, "warning", lambda text, *values: logged.append(text % values))
    monkeypatch.delenv(SWITCH, raising=False)
    hooks_launch.after_model_paths(args, lambda _: None)
    hooks_launch.around_speculation(args, lambda _: None)
    return logged, decision_of(args)


@pytest.mark.parametrize(
    ("gpu", "target"),
    [(AMD, str(target_path("tiny-dense"))), (GPUS["h200"], str(COMMANDS / "kimi-k3-nvfp4"))],
    ids=["ROCm", "KDA and MLA"],
)
def test_a_launch_that_is_left_to_sglang_logs_one_line_and_checks_nothing(
    gpu: Device, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule would refuse either pair: this drafter is not the target's."""
    [line], decided = launch(monkeypatch, gpu, target)
    assert line.startswith("DFLASH is served by SGLang's own worker, not by sglang-dflash: ")
    assert decided.plan is None and decided.reason and decided.reason in line


@pytest.mark.parametrize(
    ("architecture", "algorithm"),
    [("LlamaForCausalLM", "STANDALONE"), ("LlamaForCausalLMEagle3", "EAGLE3"), ("LlamaForCausalLMEagle", "EAGLE")],
)
def test_a_model_that_is_no_dflash_drafter_is_refused_with_its_own_algorithm(
    architecture: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a launch and by ``check``, on a GPU and on a CPU: SGLang's DFLASH worker cannot serve it either."""
    assert algorithm in SpeculativeAlgorithm.__members__
    ordinary = target(architectures=[architecture], model_type="llama", kv_lora_rank=4)
    (tmp_path / "config.json").write_text(json.dumps(ordinary))
    pair = {"target": str(target_path("tiny-dense")), "drafter": str(tmp_path)}
    for device in (GPUS["h200"], CPU):
        with pytest.raises(DFlashError, match=f"{architecture} is no DFLASH drafter.* target_layer_ids") as raised:
            launch(monkeypatch, device, pair["target"], pair["drafter"])
        [found] = [each for each in preflight(parse([], **pair)[0], device).findings if each.level != "ok"]
        assert (found.level, found.remedy) == ("error", raised.value.remedy)
        advice = f"--speculative-algorithm {algorithm},", "leave --speculative-draft-model-path out"
        assert all(each in found.remedy for each in advice) and "builtin" not in found.remedy


def test_arguments_resolved_without_us_are_left_to_sglang(caplog: pytest.LogCaptureFixture) -> None:
    assert enter.create_worker(lambda *_: int, SpeculativeAlgorithm.DFLASH, SimpleNamespace(nnodes=1)) is int
    assert caplog.messages == [
        "DFLASH is served by SGLang's own worker, not by sglang-dflash: "
        "its arguments were resolved in a process without the plugin dflash"
    ]


# --- DP attention

MODULES = {
    **{"qwen2": "qwen2", "qwen3": "qwen2", "qwen3_vl": "qwen2", "qwen3_vl_text": "qwen2", "qwen3_moe": "qwen2_moe"},
    **{"qwen3_vl_moe": "qwen2_moe", "qwen3_vl_moe_text": "qwen2_moe", "qwen3_next": "qwen3_next"},
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "qwen3_5"),
}

RULES = ("use_attn_tp_group=is_dp_attention_enabled()", "enable_tp=not is_dp_attention_enabled()")


def test_sglangs_models_embed_within_a_group() -> None:
    """From its source: these models need kernels to be imported on a GPU."""
    assert set(MODULES) == LOCAL_EMBEDDING
    for name in {*MODULES.values(), "llama"}:
        tree = ast.parse((Path(sglang.srt.models.__path__[0]) / f"{name}.py").read_text())
        calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        [made] = [call for call in calls if call.startswith("VocabParallelEmbedding(")]
        assert any(rule in made for rule in RULES) is not (name == "llama"), name
