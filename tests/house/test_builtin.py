"""What docs/results/sglang-worker.md says of SGLang's own DFLASH worker, tested on the installed SGLang."""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.speculative import dflash_utils, dflash_worker_v2
from sglang.srt.speculative.dflash_utils import (
    apply_dflash_verify_logits_adjustments,
    build_speculative_verify_target_probs,
)

pytestmark = pytest.mark.sglang

WIDTH, VOCAB = 4, 12


def info(**changes: object) -> SamplingBatchInfo:
    """Parameters of one sampled request."""
    return SamplingBatchInfo(
        temperatures=torch.ones(1, 1),
        top_ps=torch.ones(1),
        top_ks=torch.full((1,), 1 << 30, dtype=torch.int32),
        min_ps=torch.full((1,), 0.5),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=True,
        vocab_size=VOCAB,
        **changes,
    )


def test_penalties_do_not_reach_a_block_under_overlap() -> None:
    """The scheduler hands them over as ``acc_additive_penalties``; the worker looks for another name."""
    required = SimpleNamespace(
        is_required=True,
        accumulate_additive_penalties=lambda out: out.fill_(-5.0),
        accumulate_scaling_penalties=lambda: None,
    )
    handed_over = info(penalizer_orchestrator=required).copy_for_forward()
    assert handed_over.acc_additive_penalties.eq(-5.0).all()
    logits = torch.randn(WIDTH, VOCAB)
    before = logits.clone()
    apply_dflash_verify_logits_adjustments(next_token_logits=logits, sampling_info=handed_over, draft_token_num=WIDTH)
    assert torch.equal(logits, before)


def test_min_p_is_not_applied() -> None:
    logits = torch.zeros(WIDTH, VOCAB)
    logits[:, 0] = 3.0  # under min_p 0.5 the only token that is left
    probs = build_speculative_verify_target_probs(
        next_token_logits=logits, sampling_info=info(), draft_token_num=WIDTH, bs=1
    )
    assert (probs > 0).all()


@pytest.mark.parametrize("module", [dflash_utils, dflash_worker_v2])
def test_seeds_are_not_read(module: ModuleType) -> None:
    assert "sampling_seed" not in inspect.getsource(module)


def test_a_processor_sees_one_request_for_all_positions() -> None:
    seen: list[object] = []

    def processor(logits: torch.Tensor, params: list[object]) -> torch.Tensor:
        seen.extend(params)
        return logits

    request = {"__req__": object()}
    asked = info(
        device="cpu",
        has_custom_logit_processor=True,
        custom_params=[request],
        custom_logit_processor={0: ProcessorEntry(processor, rows=[0], indices=torch.tensor([0]))},
    )
    apply_dflash_verify_logits_adjustments(
        next_token_logits=torch.zeros(WIDTH, VOCAB), sampling_info=asked, draft_token_num=WIDTH
    )
    assert len(seen) == WIDTH
    assert all(params is request for params in seen)


def test_sampled_requests_are_answered_greedily_without_the_sampling_kernel() -> None:
    assert not dflash_utils.is_dflash_sampling_verify_available() or torch.cuda.is_available()
    worker = inspect.getsource(dflash_worker_v2.DFlashWorkerV2._validate_phase1_sampling_support)
    assert "falling back to greedy argmax verification" in worker


def test_a_cpu_is_not_among_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_out_of_tree=lambda: False)
    monkeypatch.setattr(speculative_hook, "current_platform", platform)
    monkeypatch.setattr(speculative_hook, "resolving_view", lambda args: args)
    with pytest.raises(ValueError, match="not supported"):
        speculative_hook._handle_dflash(SimpleNamespace(device="cpu"))


def test_its_drafter_has_a_slot_for_every_target_token_under_a_window() -> None:
    """It takes the target's pool configuration and slot allocator; only its slot table is its own."""
    allocation = inspect.getsource(dflash_worker_v2.DFlashWorkerV2.alloc_memory_pool)
    assert "memory_pool_config=memory_pool_config" in allocation
    assert "token_to_kv_pool_allocator=token_to_kv_pool_allocator" in allocation


def test_layers_that_a_drafter_does_not_name_are_guessed() -> None:
    config = dflash_utils.parse_dflash_draft_config(draft_hf_config={"num_hidden_layers": 2})
    assert config.target_layer_ids is None
    assert len(config.resolve_target_layer_ids(target_num_layers=8)) == 2


def test_tensors_that_a_drafter_lacks_are_not_missed() -> None:
    drafter = SimpleNamespace(named_parameters=lambda: [("fc.weight", torch.empty(2, 2))], projector_type=None)
    DFlashDraftModel.load_weights(drafter, [("unknown.weight", torch.empty(1))])


def test_a_drafter_of_a_shorter_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", raising=False)
    monkeypatch.delenv("SGLANG_IS_IN_CI", raising=False)
    drafter = SimpleNamespace(hf_text_config=SimpleNamespace(max_position_embeddings=512), is_draft_model=True)
    with pytest.raises(ValueError, match="greater than the derived context_length"):
        ModelConfig._derive_context_length(drafter, 1024)
