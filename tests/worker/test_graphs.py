"""What steps of each width run with: built within the memory there is, in place during such a step and only then."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.worker.start import graphs
from sglang_dflash.worker.start.graphs import WidthGraphs

pytestmark = pytest.mark.sglang

GRAPHS = graphs.DecodeCudaGraphRunner
WIDTHS = (1, 2, 4, 8)


class Device:
    """A server of block 8 whose graphs take ``per_set`` GB for a width and a model; it remembers what was built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: float = 100, per_set: float = 1) -> None:
        self.free, self.per_set, self.built = free, per_set, []
        self.width = 8
        spec = SimpleNamespace(speculative_num_draft_tokens=8, override=self._override)
        group = SimpleNamespace(broadcast_object=lambda value: value, cpu_group=None)
        parallel = SimpleNamespace(tp_group=group, tp_size=1, tp_rank=0)
        off = SimpleNamespace(overlap=SimpleNamespace(enable_two_batch_overlap=False))
        for module, name, value in (
            (graphs, "get_spec", lambda: spec),
            (graphs, "get_parallel", lambda: parallel),
            (graphs, "get_available_gpu_memory", lambda *args, **options: self.free),
            (graphs, "build_attention_backends", self._backend),
            (graphs, "draft_pp_context", contextlib.nullcontext),
            (graphs, "draft_tp_context", contextlib.nullcontext),
            (graphs, "get_exec", lambda: off),
            (graphs, "get_disagg", lambda: SimpleNamespace(enable_pdmux=False)),
            (GRAPHS, "__init__", lambda captured, runner: self._capture(captured, runner)),
        ):
            monkeypatch.setattr(module, name, value)

    @contextlib.contextmanager
    def _override(self, speculative_num_draft_tokens: int) -> Any:
        self.width = speculative_num_draft_tokens
        yield
        self.width = 8

    def _backend(self, model_runner: Any) -> Any:
        return SimpleNamespace(attn_backend=f"{model_runner.role} attention of {self.width}")

    def _capture(self, captured: Any, runner: Any) -> None:
        captured.width, self.free = self.width, self.free - self.per_set
        self.built.append((runner.role, self.width, runner.attn_backend, type(captured).__name__))

    def runner(self, role: str, attention: str = "fa3", *, graphs: bool = True, **others: Any) -> Any:
        runner = SimpleNamespace(
            role=role,
            device="cuda",
            gpu_id=0,
            attn_backend=f"{role}'s",
            prefill_attention_backend_str=attention,
            decode_attention_backend_str=attention,
            decode_cuda_graph_runner=object.__new__(GRAPHS) if graphs else None,
            kv_index_translator=SimpleNamespace(bind_and_verify_backends=lambda backends: None),
            req_to_token_pool=SimpleNamespace(),
            lora_manager=None,
            graph_memory_usage={"target_verify" if role == "target" else "draft_decode": 2 * self.per_set},
        )
        vars(runner).update(others)
        return runner


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def of(device: Device, **options: Any) -> tuple[WidthGraphs, Any, Any]:
    target, drafter = device.runner("target", **options), device.runner("drafter", **options)
    return WidthGraphs(target, drafter, None), target, drafter


def test_each_width_has_graphs_that_see_its_own_attention_backend(device: Device) -> None:
    width_graphs, *_ = of(device)
    assert width_graphs.build(WIDTHS) == WIDTHS
    assert device.built == [
        ("target", 1, "target attention of 1", "PlainDecodeGraphs"),
        ("target", 4, "target attention of 4", "DecodeCudaGraphRunner"),
        ("drafter", 4, "drafter attention of 4", "DecodeCudaGraphRunner"),
        ("target", 2, "target attention of 2", "DecodeCudaGraphRunner"),
        ("drafter", 2, "drafter attention of 2", "DecodeCudaGraphRunner"),
    ]
    assert width_graphs.memory_gb == {"decode": 1, "target_verify": 2, "draft_decode": 2}


def test_a_step_runs_with_its_width_and_leaves_sglangs_behind(device: Device) -> None:
    width_graphs, target, drafter = of(device)
    width_graphs.build(WIDTHS)
    own = target.decode_cuda_graph_runner
    with width_graphs.at(4):
        assert target.decode_cuda_graph_runner.width == drafter.decode_cuda_graph_runner.width == 4
        assert (target.attn_backend, drafter.attn_backend) == ("target attention of 4", "drafter attention of 4")
    with pytest.raises(RuntimeError), width_graphs.at(1):
        assert target.decode_cuda_graph_runner.width == 1
        raise RuntimeError
    with width_graphs.at(8):
        assert target.decode_cuda_graph_runner is own
        assert (target.attn_backend, drafter.attn_backend) == ("target's", "drafter's")


def test_widths_are_left_out_before_memory_runs_out(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    device.free = graphs.FLOOR_GB + 5.5  # the full width's sets took 4: after plain decoding's there is room once more
    width_graphs, *_ = of(device)
    assert width_graphs.build(WIDTHS) == (1, 4, 8)
    assert "no graphs for widths [2]" in caplog.text and device.free >= graphs.FLOOR_GB


def test_without_room_for_any_the_servers_width_is_left(device: Device) -> None:
    device.free = graphs.FLOOR_GB + 3.5
    width_graphs, *_ = of(device)
    assert width_graphs.build((1, 2)) == (8,) and device.built == []


@pytest.mark.parametrize(("attention", "own"), [("fa3", True), ("fa4", True), ("flashinfer", False), ("triton", False)])
def test_without_graphs_a_backend_that_plans_for_the_servers_width_is_built_for_each(
    device: Device, attention: str, own: bool
) -> None:
    width_graphs, target, _ = of(device, attention=attention, graphs=False)
    assert width_graphs.build(WIDTHS) == WIDTHS and device.built == []
    with width_graphs.at(2):
        assert target.attn_backend == ("target attention of 2" if own else "target's")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention": "aiter"}, "attention backend aiter"),
        ({"lora_manager": object()}, "LoRA"),
        (
            {"attn_backend": SimpleNamespace(linear_attn_backend=SimpleNamespace(accept_lens_pool=1))},
            "starts from a state",
        ),
        (
            {
                "req_to_token_pool": SimpleNamespace(
                    mamba_pool=SimpleNamespace(enable_linear_replayssm=False, replayssm_is_kda=True)
                )
            },
            "ReplaySSM",
        ),
    ],
)
def test_servers_that_can_take_one_width_only_say_why(
    device: Device, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    caplog.set_level("INFO")
    width_graphs, *_ = of(device, **options)
    assert width_graphs.build(WIDTHS) == (8,)
    assert "width 8 only" in caplog.text and reason in caplog.text
    assert width_graphs.build((8,)) == (8,)
