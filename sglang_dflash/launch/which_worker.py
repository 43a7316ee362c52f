"""Which worker serves DFLASH: this package's, or SGLang's own with the reason."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sglang_dflash.drafter.formats import FULL, architecture, text_config
from sglang_dflash.errors import DFlashError, Finding, builtin, error, first_true, ok
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.settings import BUILTIN, OURS, SWITCH

ON_ROCM = "the GPU is AMD's (ROCm)"
SKIP_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"

_EQUALITY, _CARDS, _IMAGES, _FAMILIES = (
    f"tests/{name}.py"
    for name in ("serving/test_dflash_equality", "serving/test_cards", "serving/test_images", "families/test_families")
)


class Proof(NamedTuple):
    """The tests that run targets of one kind.

    Attributes:
        tests: by model type of the text configuration, the test that serves it on the CPU platform and compares its
            tokens and captured layers.
        mechanisms: those of its layers that need more than full attention. ``tests/rehearsal`` runs each in SGLang's
            GPU kernels.
    """

    tests: Mapping[str, str]
    mechanisms: frozenset[str] = frozenset()


_SLIDES, _LATENT = "layers of the type sliding_attention", "latent attention (MLA)"
_DELTA_NET = "layers of the type linear_attention"
# By kind of target (docs/compatibility.md)
PROVEN = {
    "dense, full attention": Proof(
        {"qwen3": _EQUALITY, **dict.fromkeys(("qwen3_vl", "qwen3_vl_text"), _IMAGES)}
        | dict.fromkeys(("glm4", "llama", "ministral3", "mistral", "qwen2"), _FAMILIES)
    ),
    "mixture of experts, full attention": Proof(
        dict.fromkeys(("glm4_moe", "minimax_m2", "qwen3_moe"), _FAMILIES)
        | dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), _IMAGES)
    ),
    "hybrid, gated delta net and full attention": Proof(
        dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _CARDS),
        frozenset({_DELTA_NET}),
    ),
    "sliding and full attention": Proof({"gpt_oss": _FAMILIES}, frozenset({_SLIDES})),
    "the same, with K/V of two shapes": Proof({"gemma4_text": _FAMILIES}, frozenset({_SLIDES})),
    "latent attention": Proof(
        dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "kimi_k2"), _FAMILIES), frozenset({_LATENT})
    ),
}
# Model types whose embedding is whole in each DP-attention group: a drafter embeds when no other group does. A test
# serves each of them with DP attention.
LOCAL_EMBEDDING = {
    *("qwen2", "qwen3", "qwen3_vl", "qwen3_vl_text", "qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text"),
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
}
# Model types of text configurations whose layers SGLang 0.5.23 cannot capture: no worker serves them
LEFT = {
    "gemma3_text": "SGLang captures the layers of Gemma 3 without the residual: its drafters would read wrong states",
    "qwen4_exp_text": "SGLang captures no layers of Qwen3.8-Flash-Next, and no DFlash drafter is published for it",
}


def unproven_kind(target: Mapping[str, Any]) -> str | None:
    """Return the parts of a target that no test of this package runs, or None."""
    text = text_config(target)
    family = str(text.get("model_type"))
    proof = _proof(text)
    kinds = _mechanisms(text) - (proof.mechanisms if proof is not None else {_DELTA_NET})
    if not kinds and proof is None:
        kinds = {f"model_type {family}"}
    return ", ".join(sorted(kinds)) or None


def _proof(text: Mapping[str, Any]) -> Proof | None:
    return next((proof for proof in PROVEN.values() if text.get("model_type") in proof.tests), None)


def _mechanisms(text: Mapping[str, Any]) -> set[str]:
    found = {_LATENT: text.get("kv_lora_rank"), "sparse attention (DSA)": text.get("index_topk")}
    of_layers = {*map(str, text.get("layer_types") or ())} - {FULL, "attention"}
    return {name for name, applies in found.items() if applies} | {f"layers of the type {kind}" for kind in of_layers}


def _has_mamba(text: Mapping[str, Any]) -> bool:
    # names of layers, or Nemotron-H's pattern of letters
    names = text.get("layers_block_type") or text.get("hybrid_override_pattern") or text.get("layer_types")
    return isinstance(names, str | list) and any(each in ("M", "mamba") for each in names)


def check_switch(launch: Launch) -> Iterator[Finding]:
    if launch.settings.wants_builtin:
        yield builtin(f"{SWITCH}={BUILTIN}")
    if launch.device.is_rocm:
        yield builtin(ON_ROCM)


def check_target(launch: Launch) -> Iterator[Finding]:
    published = launch.target_files.published
    if "DFlash" in str(architecture(published)) or "dflash_config" in published:
        raise DFlashError(
            f"the target {launch.target_files.name} is a DFLASH drafter",
            remedy="swap the two models" if launch.has_drafter else "name the model that it drafts for",
        )
    _ = launch.foreign_type  # raises for a drafter that SGLang does not serve as DFLASH either
    if reason := LEFT.get(str(launch.text.get("model_type"))):
        yield builtin(reason)
    layers = {"Mamba2": _has_mamba(launch.text), "KDA": "linear_attn_config" in launch.text}
    if recurrent := first_true(layers):
        yield builtin(f"the target has {recurrent} layers, whose recurrent states sglang-dflash cannot replay")
    kind = unproven_kind(launch.target)
    if kind is not None and launch.settings.variable(SWITCH) != OURS:
        yield builtin(f"no test of sglang-dflash runs a target with {kind} ({SWITCH}={OURS} serves it)")


def check_worker(launch: Launch) -> Iterator[Finding]:
    settings = launch.settings
    if launch.device.kind == "gpu" and not (settings.device or "cuda").startswith("cuda"):
        yield builtin(f"the device is {settings.device}")
    if settings.attn_cp_size > 1 and settings.groups == 1:
        yield builtin("context parallelism is used")
    if settings.enable_watermark:
        yield builtin("--enable-watermark is used")
    if not settings.speculative_accept_threshold_single == settings.speculative_accept_threshold_acc == 1.0:
        yield builtin("--speculative-accept-threshold-single or -acc is not lossless")
    yield ok("sglang-dflash")


def served_by_neither(reason: str, launch: Launch) -> Iterator[Finding]:
    """Yield why SGLang's own worker cannot serve a pair that is left to it for ``reason``."""
    by_switch = launch.settings.wants_builtin
    if not launch.has_drafter and not by_switch:
        yield error(
            f"{reason}, and SGLang's own worker needs a drafter",
            remedy="set --speculative-draft-model-path, or change what is named",
        )
    elif launch.device.kind == "cpu":
        yield error(
            f"{reason}, on the CPU platform, where SGLang's own worker does not run",
            remedy=f"unset {SWITCH}, or serve on a GPU"
            if by_switch
            else "serve it without --speculative-algorithm DFLASH"
            if reason in LEFT.values()
            else "run this pair on a GPU, where SGLang's own worker supports it",
        )


def check_uses(launch: Launch) -> Iterator[Finding]:
    settings, proof = launch.settings, _proof(launch.text)
    kinds = ", ".join(sorted(proof.mechanisms - {_DELTA_NET})) if proof is not None else ""
    uses = {
        f"--disaggregation-mode {settings.disaggregation_mode}": settings.disaggregation_mode != "null",
        "--enable-lora": settings.enable_lora,
    }
    if kinds and (use := first_true(uses)):
        yield error(
            f"no test runs {use} for a target with {kinds}",
            remedy=f"leave {use.partition(' ')[0]} out, or set {SWITCH}={BUILTIN} to try SGLang's own worker",
        )
    if settings.enable_nvidia_megakernel:
        yield error(
            "--enable-nvidia-megakernel replaces the forward pass of decode and verify steps, which this "
            "package captures in CUDA graphs",
            remedy=f"{SWITCH}={BUILTIN} for SGLang's own worker, or leave --enable-nvidia-megakernel out",
        )


def check_dp_attention(launch: Launch) -> Iterator[Finding]:
    """An error on GPUs too: SGLang's worker would serve silently, with an eager drafter and one width."""
    groups = launch.settings.groups
    attempt = "" if launch.device.kind == "cpu" else f", or set {SWITCH}={BUILTIN} to try SGLang's own worker"
    for missing in _without_dp_attention(launch) if groups > 1 else ():
        value = f"DP attention over {groups} groups of ranks with {missing.value}"
        yield replace(missing, value=value, remedy=missing.remedy + attempt)


def _without_dp_attention(launch: Launch) -> Iterator[Finding]:
    settings, family = launch.settings, str(launch.text.get("model_type"))
    skip_gather = settings.variable(SKIP_GATHER)
    tied = launch.target.get("tie_word_embeddings", launch.text.get("tie_word_embeddings"))
    if not settings.enable_dp_lm_head:
        yield error(
            "one LM head for all ranks, which a group needs for drafts when no other group does",
            remedy="add --enable-dp-lm-head",
        )
    if settings.attn_cp_size > 1:
        yield error("context parallelism", remedy="leave --attn-cp-size out")
    if skip_gather.lower() in ("1", "true", "t", "yes", "y", "on"):
        yield error(
            f"{SKIP_GATHER}={skip_gather}, which skips the exchange in which ranks agree on a block width",
            remedy=f"unset {SKIP_GATHER}",
        )
    if settings.disaggregation_mode != "null":
        yield error(
            f"--disaggregation-mode {settings.disaggregation_mode}",
            remedy="use --tp-size without DP attention in a disaggregated pair",
        )
    if family not in LOCAL_EMBEDDING:
        yield error(
            f"a target of the type {family}, not one of {', '.join(sorted(LOCAL_EMBEDDING))}",
            remedy="use --tp-size without DP attention",
        )
    if settings.sharing > 1 and tied and family.startswith("qwen3_5"):
        yield error(
            f"{settings.sharing} ranks per group, and a tied LM head that SGLang does not divide",
            remedy=f"set --attn-dp-size {settings.tp_size}",
        )
