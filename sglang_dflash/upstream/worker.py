"""SGLang names for a scheduler. Importing them is slow."""

from sglang.kernels.ops.activation.softcap import cast_to_float32_logits
from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import scatter_mamba_states_after_mtp_verify
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.utils import append_state_component
from sglang.srt.environ import envs
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.attention.hybrid_linear_attn_backend import track_mamba_states_all_layers
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod, get_bf16_gemm_backend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.sampler import Sampler
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput, UpdateWeightFromDiskReqOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode, assign_req_to_token_pool_func
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, page_aligned_decode_alloc_lens
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner, SamplingPrewarmResult
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import build_attention_backends
from sglang.srt.model_executor.model_runner_components.weight_updater import _model_load_weights_direct
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (
    _weak_ref_if_tensor as weak_ref,
)
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.qwen2 import Qwen2MLP
from sglang.srt.runtime_context import (
    get_context,
    get_disagg,
    get_exec,
    get_lora,
    get_memory,
    get_observability,
    get_parallel,
    get_schedule,
    get_server_args,
    get_serving,
    get_spec,
    mamba_track_grid,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    commit_mamba_states_after_verify,
    draft_pp_context,
    draft_tp_context,
    prepare_mamba_track_for_verify,
    record_stream_each,
)
from sglang.srt.utils.common import (
    async_d2h,
    async_h2d,
    async_h2d_stack,
    ceil_align,
    get_available_gpu_memory,
    require_mlp_tp_gather,
)


def add_models(models: dict[str, type]) -> None:
    """Add classes to SGLang's registry by architecture; imports all of SGLang's models (3 s)."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models.update(models)
