"""Every server argument and environment variable that this package reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sglang_dflash.drafter.checkpoint import parse_object
from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import BUILTIN, SWITCH

OURS = "sglang-dflash"
COPIES_SWITCH = "SGLANG_DFLASH_COPIES"
EXACT_SWITCH = "SGLANG_DFLASH_EXACT"
REPLAY_SWITCH = "SGLANG_DFLASH_STATE_REPLAY"
ONE_FORWARD_SWITCH = "SGLANG_DFLASH_ONE_FORWARD"
VERIFY_SWITCH = "SGLANG_DFLASH_VERIFY_ATTENTION"
_WORDS = {SWITCH: (BUILTIN, OURS), EXACT_SWITCH: ("0",), VERIFY_SWITCH: ("0",)}
_WORDS |= dict.fromkeys((COPIES_SWITCH, REPLAY_SWITCH, ONE_FORWARD_SWITCH), ("0", "1"))
DETERMINISTIC_FLAG = "--enable-deterministic-inference"
OVERRIDE_FLAG = "--json-model-override-args"
PLAIN_LAYERS = "unquant"  # of --speculative-draft-model-quantization

MAX_RUNNING = 48  # for DFLASH
# attention backend -> its pages, tokens; SGLang replaces other sizes by 64
_MLA_PAGES = dict.fromkeys(("cutedsl_mla", "trtllm_mla"), (32, 64))
_PAGES = {"trtllm_mha": (16, 32, 64, 128), "flashmla": (64,), **_MLA_PAGES}
# --mamba-radix-cache-strategy -> recurrent-state slots per running request, with overlap scheduling
SLOTS = {"extra_buffer": 5, "extra_buffer_lazy": 4, "no_buffer": 3}

_LIMITS: dict[str, tuple[float, float]] = {
    "context_length": (1, 1 << 31),
    "linear_replayssm_cache_len": (1, 1 << 16),
    "mamba_full_memory_ratio": (1e-6, 1e6),
    "mamba_track_interval": (1, 1 << 31),
    "max_mamba_cache_size": (1, 1 << 31),
    "max_running_requests": (1, 1 << 20),
    "max_total_tokens": (1, 1 << 40),
    "mem_fraction_static": (1e-6, 1),
    "page_size": (1, 1 << 20),
    "pp_size": (1, 1 << 16),
    "speculative_dflash_block_size": (2, 1 << 12),
    "speculative_draft_window_size": (1, 1 << 31),
    "speculative_num_draft_tokens": (2, 1 << 12),  # an anchor and a draft
    "swa_full_tokens_ratio": (1e-6, 1),
    "tp_size": (1, 1 << 16),
}
_OTHERS = {
    "model": ("model_path", "revision", "trust_remote_code", "json_model_override_args", "chat_template", "dtype"),
    "weights": ("quantization", "cpu_offload_gb", "offload_group_size", "enable_weights_cpu_backup", "enable_lora"),
    "device": ("device", "base_gpu_id", "enable_memory_saver", "enable_torch_compile", "enable_nvidia_megakernel"),
    "K/V": ("kv_cache_dtype", "disable_radix_cache", "enable_unified_memory", "enable_hierarchical_cache"),
    "sliding layers": ("disable_hybrid_swa_memory",),
    "attention": ("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    "linear attention": ("linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend"),
    "verify of states": ("linear_attn_verify_backend", "enable_linear_replayssm", "enable_linear_replayssm_spec"),
    "states": ("mamba_ssm_dtype", "mamba_radix_cache_strategy"),
    "other kernels": ("moe_runner_backend", "bf16_gemm_backend", "grammar_backend", "enable_deterministic_inference"),
    "ranks": ("attn_cp_size", "attn_dp_size", "dp_size", "enable_dp_attention", "enable_dp_lm_head"),
    "disaggregation": ("disaggregation_mode", "disaggregation_decode_extra_slots", "enable_pd_role_switch"),
    "retraction": ("disaggregation_decode_retraction_backup",),
    "batches": ("chunked_prefill_size", "enable_mixed_chunk", "disable_overlap_schedule", "enable_watermark"),
    "acceptance": ("speculative_accept_threshold_acc", "speculative_accept_threshold_single"),
    "sampled acceptance": ("speculative_use_rejection_sampling", "speculative_use_block_verification"),
    "widths": ("speculative_adaptive", "speculative_adaptive_config"),
    "drafter": ("speculative_draft_model_path", "speculative_draft_model_revision"),
    "drafter's weights": ("speculative_draft_model_quantization",),
    "drafter's attention": ("speculative_draft_attention_backend", "speculative_draft_kv_cache_dtype"),
}
READ = frozenset(_LIMITS).union(*_OTHERS.values())  # `check` names other arguments that a command sets


@dataclass(frozen=True)
class Settings:
    """SGLang's arguments as attributes, by SGLang's names; None means unset.

    Each read returns what SGLang has resolved so far. ``changes`` replace arguments.
    """

    arguments: Any = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of copies and pickles
            raise AttributeError(name)
        return self.changes[name] if name in self.changes else getattr(self.arguments, name)

    def changed(self, **changes: Any) -> Settings:
        return replace(self, changes={**self.changes, **changes})

    def variable(self, name: str) -> str:
        return self.environ.get(name, "")

    def validate(self) -> None:
        """Raise DFlashError for a switch's unknown word or, if our worker may serve, a number out of its limits."""
        for name, words in _WORDS.items():
            if self.variable(name) not in ("", *words):
                problem = f"{name}={self.variable(name)!r} is not {' or '.join(words)}"
                raise DFlashError(problem, remedy=f"unset {name}")
        for name, (least, most) in {} if self.wants_builtin else _LIMITS.items():
            value, flag = getattr(self, name, None), flag_of(name)
            if value is not None and not (isinstance(value, int | float) and least <= value <= most):
                problem = f"{flag} {value} is outside {least if least >= 1 else 0} to {most}"
                raise DFlashError(problem, remedy=f"correct it, or leave {flag} out")

    @property
    def wants_builtin(self) -> bool:
        return self.variable(SWITCH) == BUILTIN

    @property
    def wants_one_forward(self) -> bool:
        return self.variable(ONE_FORWARD_SWITCH) == "1"

    @property
    def dequantises(self) -> bool:
        return self.speculative_draft_model_quantization in (None, PLAIN_LAYERS)

    @property
    def overrides(self) -> dict[str, Any]:
        return parse_object(self.json_model_override_args, OVERRIDE_FLAG)

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
        for backend in {*backends, self.speculative_draft_attention_backend} & _PAGES.keys():
            return self.page_size if self.page_size in _PAGES[backend] else 64
        return self.page_size or (128 if "fa4" in backends else 1)

    @property
    def decode_backend(self) -> str:
        return self.linear_attn_decode_backend or self.linear_attn_backend


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


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
