"""The server arguments and environment variables that this package reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sglang_dflash.drafter.checkpoint import parse_object
from sglang_dflash.errors import DFlashError, first_true
from sglang_dflash.upstream import BUILTIN, SWITCH

OURS = "sglang-dflash"
EXACT_SWITCH = "SGLANG_DFLASH_EXACT"
ONE_FORWARD_SWITCH = "SGLANG_DFLASH_ONE_FORWARD"
VERIFY_SWITCH = "SGLANG_DFLASH_VERIFY_ATTENTION"
_WORDS = {SWITCH: (BUILTIN, OURS), EXACT_SWITCH: ("0",), VERIFY_SWITCH: ("0",), ONE_FORWARD_SWITCH: ("0", "1")}
DETERMINISTIC_FLAG = "--enable-deterministic-inference"
OVERRIDE_FLAG = "--json-model-override-args"
PLAIN_LAYERS = "unquant"  # value of --speculative-draft-model-quantization

MAX_RUNNING = 48  # SGLang's default for DFLASH
# attention backend -> its pages, tokens; SGLang replaces other sizes by 64
_MLA_PAGES = dict.fromkeys(("cutedsl_mla", "trtllm_mla"), (32, 64))
_PAGES = {"trtllm_mha": (16, 32, 64, 128), "flashmla": (64,), **_MLA_PAGES}
# --mamba-radix-cache-strategy -> recurrent-state slots per running request, with overlap scheduling
SLOTS = {"extra_buffer": 5, "extra_buffer_lazy": 4, "no_buffer": 3}

_LIMITS: dict[str, tuple[float, float]] = {
    "context_length": (1, 1 << 31), "linear_replayssm_cache_len": (1, 1 << 16), "mamba_full_memory_ratio": (1e-6, 1e6),
    "mamba_track_interval": (1, 1 << 31), "max_mamba_cache_size": (1, 1 << 31), "max_running_requests": (1, 1 << 20),
    "max_total_tokens": (1, 1 << 40), "mem_fraction_static": (1e-6, 1), "page_size": (1, 1 << 20),
    "pp_size": (1, 1 << 16), "speculative_dflash_block_size": (2, 1 << 12), "tp_size": (1, 1 << 16),
    "speculative_draft_window_size": (1, 1 << 31), "swa_full_tokens_ratio": (1e-6, 1),
    "speculative_num_draft_tokens": (2, 1 << 12),  # an anchor and a draft
}  # fmt: skip
# arguments that are an error without a drafter
DRAFTER_ARGUMENTS = tuple(
    f"speculative_draft_{name}"
    for name in ("attention_backend", "kv_cache_dtype", "model_quantization", "model_revision", "window_size")
)


@dataclass(frozen=True)
class Settings:
    """SGLang's arguments as attributes with SGLang's names; None means unset.

    Each read returns the current value, which SGLang may still resolve, and adds the name to ``read``. ``changes``
    replace arguments.
    """

    arguments: Any = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    changes: Mapping[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set, compare=False)  # shared with the settings that `changed` returns

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copies and pickles read such names
            raise AttributeError(name)
        self.read.add(name)
        return self.changes[name] if name in self.changes else getattr(self.arguments, name)

    def changed(self, **changes: Any) -> Settings:
        return replace(self, changes={**self.changes, **changes})

    def variable(self, name: str) -> str:
        return self.environ.get(name, "")

    def validate(self) -> None:
        """Raise DFlashError for an unknown value of a variable or, if our worker may serve, a number out of range."""
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
    def asks_one_forward(self) -> bool:
        return self.variable(ONE_FORWARD_SWITCH) == "1"

    @property
    def one_forward_obstacle(self) -> str | None:
        """Why this package cannot replay the drafter's graphs, or None. Tests run it on one rank only."""
        backend = self.cuda_graph_backend_decode
        return first_true({
            f"--tp-size {self.tp_size}": self.tp_size > 1,
            "--enable-pdmux": self.enable_pdmux,
            f"--cuda-graph-backend-decode {backend}": backend not in (None, "full"),
        })  # fmt: skip

    @property
    def wants_one_forward(self) -> bool:
        return self.asks_one_forward and self.one_forward_obstacle is None

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
        # the old flags, which SGLang resolves to --attn-dp-size
        return self.dp_size if self.enable_dp_attention and self.attn_dp_size == 1 else self.attn_dp_size

    @property
    def replicas(self) -> int:
        """Copies of the whole server behind one address (``--dp-size`` without DP attention)."""
        return 1 if self.enable_dp_attention else max(1, self.dp_size)

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
    """Return the requests per replica that hold rows during a K/V transfer, as SGLang's ``handle_pd_disaggregation``.

    None without disaggregation.
    """
    if settings.disaggregation_mode == "null":
        return None
    extra = cast("int | None", settings.disaggregation_decode_extra_slots)
    if settings.disaggregation_mode == "prefill" or extra is not None:
        return extra or 0
    running = max(1, (settings.max_running_requests or MAX_RUNNING) // (settings.replicas * settings.groups))
    return 2 * running if running <= 32 else 0
