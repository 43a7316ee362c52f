"""Every Triton kernel of a step compiles for the GPUs that are served, as it is launched; ours without spills."""

from __future__ import annotations

import pytest

from tests.ops.test_triton import KERNELS, MOST_REGISTERS
from tests.rehearsal.kernels import CAPABILITIES, Row, compile_all

pytestmark = pytest.mark.slow

# What SGLang launches; an upgrade that launches others wants its own look.
SGLANGS = {
    "_advance_gdn_spec_cursors_kernel",
    "_causal_conv1d_fwd_kernel",
    "_causal_conv1d_update_kernel",
    "_finish_gdn_replayssm_circular_fold_kernel",
    "_fused_commit_track_indices_kernel",
    "_fused_conv_window_scatter_multi_kernel",
    "_fused_conv_window_scatter_with_mask_kernel",
    "_fused_mamba_state_scatter_with_mask_kernel",
    "_fused_qk_rmsnorm_rope_gate_kernel",
    "_fused_replay_state_indices_kernel",
    "_fused_sigmoid_mul_kernel",
    "_fused_slot_copy_kernel",
    "_fwd_grouped_kernel_stage1",
    "_fwd_kernel",
    "_fwd_kernel_stage2",
    "_layer_norm_fwd_1pass_kernel",
    "alloc_extend_kernel",
    "assign_req_to_token_pool",
    "chunk_fwd_kernel_o",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
    "chunk_local_cumsum_scalar_kernel",
    "create_flashinfer_kv_indices_triton",
    "fused_gdn_gating_kernel",
    "fused_qkv_split_gdn_prefill_kernel",
    "fused_qkvzba_split_reshape_cat_contiguous_kernel",
    "fused_qkvzba_split_reshape_cat_kernel",
    "fused_recurrent_gated_delta_rule_packed_decode_kernel",
    "fused_sigmoid_gating_delta_rule_update_kernel",
    "gdn_replayssm_compact_commit_kernel",
    "gdn_replayssm_spec_circular_kernel",
    "get_last_loc_kernel",
    "l2norm_fwd_kernel",
    "layer_norm_gated_fwd_kernel",
    "recompute_w_u_fwd_kernel",
    "track_mamba_state_if_needed_kernel",
    "write_req_to_token_pool_triton",
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return compile_all(tp_sizes=(1, 8))


def test_ours_do_not_spill(rows: list[Row]) -> None:
    ours = [row for row in rows if row.owner == "ours"]
    assert {(row.capability, row.kernel) for row in ours} == {(it, name) for it in CAPABILITIES for name in KERNELS}
    for row in ours:
        assert row.stack == 0 and row.registers <= MOST_REGISTERS and row.fits, row


def test_sglangs_compile_and_find_room(rows: list[Row]) -> None:
    """Spills are SGLang's affair, docs/results/kernels.md names them; a block without room for itself cannot start."""
    for capability in CAPABILITIES:
        found = [row for row in rows if row.owner == "SGLang" and row.capability == capability]
        assert {row.kernel for row in found} == SGLANGS
        assert [(row.kernel, row.shared, row.places) for row in found if not row.fits] == []
