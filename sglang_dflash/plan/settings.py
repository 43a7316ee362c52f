"""Every server argument and environment variable that this package reads, with SGLang's defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

from sglang_dflash.drafter.checkpoint import parse_object
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang_dflash.plan.device import Device

SWITCH = "SGLANG_DFLASH"
BUILTIN, OURS = "builtin", "sglang-dflash"
COPIES_SWITCH = "SGLANG_DFLASH_COPIES"
EXACT_SWITCH = "SGLANG_DFLASH_EXACT"
DRAFTER_OVERRIDE = "SGLANG_DFLASH_DRAFTER_OVERRIDE"
REPLAY_SWITCH = "SGLANG_DFLASH_STATE_REPLAY"
LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
SKIP_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
RAGGED_VERIFY = "SGLANG_RAGGED_VERIFY_MODE"
DETERMINISTIC_FLAG = "--enable-deterministic-inference"
REPLAY_FLAG, RECORDS_FLAG = "--enable-linear-replayssm-spec", "--linear-replayssm-cache-len"
WINDOW_FLAG = "--speculative-draft-window-size"
OVERRIDE_FLAG = "--json-model-override-args"
PLAIN_LAYERS = "unquant"  # of --speculative-draft-model-quantization

MAX_RUNNING = 48  # for DFLASH
# --mamba-radix-cache-strategy -> recurrent-state slots per running request, with overlap scheduling
SLOTS = {"extra_buffer": 5, "extra_buffer_lazy": 4, "no_buffer": 3}
_REPLAYING_BACKENDS = ("triton", "flashinfer")
_MIN_RING = 16  # SGLang's kernels multiply tiles of at least 16


def _number(default: Any, least: float, most: float) -> Any:
    return field(default=default, metadata={"limits": (least, most)})


def _variable(name: str, *words: str) -> Any:
    """Declare an environment variable: empty if unset, otherwise one of ``words`` if given."""
    return field(default="", metadata={"variable": name, "words": words})


@dataclass(frozen=True)
class Settings:
    """Server arguments by SGLang's names, then environment variables. None means unset."""

    model_path: str = ""
    speculative_draft_model_path: str | None = None
    attention_backend: str | None = None
    attn_cp_size: int = 1
    attn_dp_size: int = 1
    base_gpu_id: int = 0
    bf16_gemm_backend: str = "auto"
    chat_template: str | None = None
    chunked_prefill_size: int | None = None
    context_length: int | None = _number(None, 1, 1 << 31)
    cpu_offload_gb: int = 0
    decode_attention_backend: str | None = None
    device: str | None = None
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    disaggregation_decode_extra_slots: int | None = None
    disaggregation_decode_retraction_backup: str | None = None
    disaggregation_mode: str = "null"
    dp_size: int = 1
    dtype: str = "auto"
    enable_deterministic_inference: bool = False
    enable_dp_attention: bool = False
    enable_dp_lm_head: bool = False
    enable_linear_replayssm: bool = False
    enable_linear_replayssm_spec: bool = False
    enable_lora: bool | None = None
    enable_memory_saver: bool = False
    enable_mixed_chunk: bool = False
    enable_nvidia_megakernel: bool = False
    enable_pd_role_switch: bool = False
    enable_torch_compile: bool = False
    enable_unified_memory: bool = False
    enable_watermark: bool = False
    enable_weights_cpu_backup: bool = False
    grammar_backend: str | None = None
    json_model_override_args: str = "{}"
    kv_cache_dtype: str = "auto"
    linear_attn_backend: str = "triton"
    linear_attn_decode_backend: str | None = None
    linear_attn_prefill_backend: str | None = None
    linear_attn_verify_backend: str | None = None
    linear_replayssm_cache_len: int = _number(16, 1, 1 << 16)
    mamba_full_memory_ratio: float | None = _number(None, 1e-6, 1e6)
    mamba_radix_cache_strategy: str = "auto"
    mamba_ssm_dtype: str | None = None
    mamba_track_interval: int | None = _number(256, 1, 1 << 31)
    max_mamba_cache_size: int | None = _number(None, 1, 1 << 31)
    max_running_requests: int | None = _number(None, 1, 1 << 20)
    max_total_tokens: int | None = _number(None, 1, 1 << 40)
    mem_fraction_static: float | None = _number(None, 1e-6, 1)
    moe_runner_backend: str = "auto"
    offload_group_size: int = -1
    page_size: int | None = _number(None, 1, 1 << 20)
    pp_size: int = _number(1, 1, 1 << 16)
    prefill_attention_backend: str | None = None
    quantization: str | None = None
    revision: str | None = None
    speculative_accept_threshold_acc: float = 1.0
    speculative_accept_threshold_single: float = 1.0
    speculative_adaptive: bool = False
    speculative_adaptive_config: str | None = None
    speculative_dflash_block_size: int | None = _number(None, 2, 1 << 12)
    speculative_draft_attention_backend: str | None = None
    speculative_draft_kv_cache_dtype: str | None = None
    speculative_draft_model_quantization: str | None = None
    speculative_draft_model_revision: str | None = None
    speculative_draft_window_size: int | None = _number(None, 1, 1 << 31)
    speculative_num_draft_tokens: int | None = _number(None, 2, 1 << 12)  # an anchor and a draft
    speculative_use_block_verification: bool = False
    speculative_use_rejection_sampling: bool = False
    tp_size: int = _number(1, 1, 1 << 16)
    trust_remote_code: bool = False

    worker_switch: str = _variable(SWITCH, BUILTIN, OURS)
    copies_switch: str = _variable(COPIES_SWITCH, "0", "1")
    exact_switch: str = _variable(EXACT_SWITCH, "0")
    replay_switch: str = _variable(REPLAY_SWITCH, "0", "1")
    drafter_override: str = _variable(DRAFTER_OVERRIDE)
    skip_gather: str = _variable(SKIP_GATHER)
    ragged_verify: str = _variable(RAGGED_VERIFY)
    longer_context: str = _variable(LONGER_CONTEXT)
    conv_dtype_variable: str = _variable("SGLANG_MAMBA_CONV_DTYPE")
    ssm_dtype_variable: str = _variable("SGLANG_MAMBA_SSM_DTYPE")

    @classmethod
    def of(cls, arguments: object, environ: Mapping[str, str] = os.environ) -> Settings:
        given: dict[str, Any] = {each.name: getattr(arguments, each.name) for each in argument_fields()}
        given |= {each.name: environ.get(each.metadata["variable"], "") for each in _variables()}
        return cls(**given)

    def validate(self) -> str:
        for each in _variables():
            value, words = getattr(self, each.name), each.metadata["words"]
            if words and value not in ("", *words):
                name, expected = each.metadata["variable"], ", ".join([*words, "or unset"])
                raise DFlashError(f"{name}={value!r}", expected=expected, remedy=f"unset {name}")
        if self.wants_builtin:
            return f"{SWITCH}={self.worker_switch}"
        for each in argument_fields():
            value, limits = getattr(self, each.name), each.metadata.get("limits")
            if limits is None or (value is None and each.default is None):
                continue
            if not isinstance(value, int | float) or not limits[0] <= value <= limits[1]:
                flag = flag_of(each.name)
                raise DFlashError(
                    f"{flag} {value}",
                    expected=f"a number from {limits[0]} to {limits[1]}",
                    remedy=f"correct it, or leave {flag} out",
                )
        return "all within range"

    @property
    def wants_builtin(self) -> bool:
        return self.worker_switch == BUILTIN

    @property
    def dequantises(self) -> bool:
        return self.speculative_draft_model_quantization in (None, PLAIN_LAYERS)

    @property
    def overrides(self) -> dict[str, Any]:
        return parse_object(self.json_model_override_args, OVERRIDE_FLAG)

    @property
    def drafter_overrides(self) -> dict[str, Any]:
        return parse_object(self.drafter_override or "{}", DRAFTER_OVERRIDE)

    @property
    def block(self) -> int | None:
        """Block size that the flags set, in tokens."""
        return self.speculative_num_draft_tokens or self.speculative_dflash_block_size

    @property
    def groups(self) -> int:
        """Groups of ranks that serve different requests (DP attention); 1 without it."""
        # the old spelling, which SGLang resolves to --attn-dp-size
        return self.dp_size if self.enable_dp_attention and self.attn_dp_size == 1 else self.attn_dp_size

    @property
    def sharing(self) -> int:
        """Ranks that serve the same requests."""
        return max(1, self.tp_size // self.groups)

    @property
    def running(self) -> int:
        """Maximum concurrent requests of a rank."""
        return max(1, (self.max_running_requests or MAX_RUNNING) // self.groups)

    @property
    def page(self) -> int:
        """Tokens per K/V page: ``--page-size``, or what the attention backend forces."""
        backends = {self.attention_backend, self.prefill_attention_backend, self.decode_attention_backend}
        if "trtllm_mha" in backends | {self.speculative_draft_attention_backend}:
            return self.page_size if self.page_size in (16, 32, 64, 128) else 64
        return self.page_size or (128 if "fa4" in backends else 1)

    @property
    def decode_backend(self) -> str:
        return self.linear_attn_decode_backend or self.linear_attn_backend

    def flashinfer_states(self, machine: Device) -> str | None:
        """Return the flag that selects FlashInfer's kernels for recurrent states, which need bfloat16, or None."""
        if not machine.is_blackwell:
            return None
        if self.decode_backend == "flashinfer":
            return "--linear-attn-decode-backend" if self.linear_attn_decode_backend else "--linear-attn-backend"
        return "--linear-attn-verify-backend" if self.linear_attn_verify_backend == "flashinfer" else None

    def needs_bfloat16_states(self, machine: Device) -> bool:
        return self.mamba_ssm_dtype is None and self.flashinfer_states(machine) is not None

    def state_dtype(self, machine: Device) -> str | None:
        return self.mamba_ssm_dtype or ("bfloat16" if self.needs_bfloat16_states(machine) else None)

    @property
    def states_kept_by(self) -> str | None:
        """Return why a recurrent state is stored per draft token, or None: states are replayed.

        Sources: SGLang's ``handle_linear_attn_backend``, and ``unified_memory_pool.py``, which allocates no records.

        Raises:
            DFlashError: a replay is requested too.
        """
        reasons = {
            f"{REPLAY_SWITCH}=0": self.replay_switch == "0",
            f"the linear-attention backend is {self.decode_backend}": self.decode_backend not in _REPLAYING_BACKENDS,
            "--enable-linear-replayssm keeps separate records": self.enable_linear_replayssm,
            "--disaggregation-mode prefill: this server verifies nothing": self.disaggregation_mode == "prefill",
            "--enable-unified-memory allocates no records": self.enable_unified_memory,
            f"{RAGGED_VERIFY}={self.ragged_verify}": self.ragged_verify not in ("", "static"),
        }
        reason = next((reason for reason, applies in reasons.items() if applies), None)
        if reason and (self.enable_linear_replayssm_spec or self.replay_switch == "1"):
            request = REPLAY_FLAG if self.enable_linear_replayssm_spec else f"{REPLAY_SWITCH}=1"
            raise DFlashError(
                f"{request}, but {reason}",
                expected="a server that can replay recurrent states",
                remedy=f"leave {request} out: states are replayed wherever they can be",
            )
        return reason

    def record_length(self, block: int) -> int:
        """Return the positions of a request's replay records; DFlashError for too few, which SGLang does not check."""
        chosen, needed = self.linear_replayssm_cache_len, ring_length(block)
        if chosen == Settings.linear_replayssm_cache_len:  # the default, or the same value set by the user
            return needed
        if chosen < needed or chosen & (chosen - 1):
            raise DFlashError(
                f"{RECORDS_FLAG} {chosen}",
                expected=f"a power of two, at least {needed} for blocks of {block}",
                remedy=f"leave {RECORDS_FLAG} out",
            )
        return chosen


def argument_fields() -> list[Field[Any]]:
    return [each for each in fields(Settings) if "variable" not in each.metadata]


def _variables() -> list[Field[Any]]:
    return [each for each in fields(Settings) if "variable" in each.metadata]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def ring_length(block: int) -> int:
    """Return the smallest power of two that holds a block of ``block`` tokens.

    Such a ring is full after every verify, so every commit updates the state.
    """
    return max(_MIN_RING, 1 << (block - 1).bit_length())


def slots_per_request(settings: Any) -> int:
    """Return the recurrent-state slots per running request, as SGLang's ``_calculate_mamba_ratio`` does."""
    if settings.disable_radix_cache or settings.disaggregation_mode == "decode":
        return 1
    slots = SLOTS.get(settings.mamba_radix_cache_strategy, SLOTS["extra_buffer"])
    return min(slots, SLOTS["extra_buffer_lazy"]) if settings.disable_overlap_schedule else slots


def in_transfer(settings: Any) -> int | None:
    """Return the requests that hold rows during a K/V transfer, as SGLang's ``handle_pd_disaggregation`` does.

    None without disaggregation.
    """
    if settings.disaggregation_mode == "null":
        return None
    extra = cast("int | None", settings.disaggregation_decode_extra_slots)
    if settings.disaggregation_mode == "prefill" or extra is not None:
        return extra or 0
    running = settings.max_running_requests or MAX_RUNNING
    return 2 * running if running <= 32 else 0
