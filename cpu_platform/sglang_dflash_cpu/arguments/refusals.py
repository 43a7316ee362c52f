"""Refusals of the CPU platform, in the launching process, before any weight is read.

Each check is a table: whether to refuse, and the three parts of the message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dflash.drafter.config import quantization
from sglang_dflash.errors import DFlashError
from sglang_dflash_cpu.layers import ATTENTION_BACKEND

_ATTENTION_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_KV_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32")
_PLAIN = (None, "unquant")
_DECODERS = "dense, MoE or gated-delta-net hybrid decoders with grouped-query attention"
_GPU = "serve it on a GPU, where this platform stays out of the way"

Rule = tuple[bool, str, str, str]  # whether to refuse, what was found, what was expected, the remedy


def check_before_model(cfg: Any, known: list[str]) -> None:
    """Refuse what can be seen before the model's config is read: an unknown attention backend, a missing folder.

    argparse refuses an unknown backend on a command line; ``Engine`` does not.

    Args:
        cfg: server arguments, read by attribute.
        known: SGLang's list of attention backends, ours included.

    Raises:
        DFlashError: naming the argument and its value.
    """
    backends: list[Rule] = [
        (
            getattr(cfg, field) not in (None, *known),
            f"{field}={getattr(cfg, field)!r}",
            f"one of {', '.join(sorted(known))}",
            f"leave it out: the CPU platform serves every model with {ATTENTION_BACKEND}",
        )
        for field in _ATTENTION_FIELDS
    ]
    missing_folder = (
        _is_missing_path(cfg.model_path),
        f"--model-path {cfg.model_path} does not exist",
        "a checkpoint folder on this machine, or a hub id of the form owner/name",
        "check the path; `sglang-dflash pairs path tiny-hybrid` prints that of a model which ships here",
    )
    _refuse(*backends, missing_folder)


def check_target(model_config: Any, cfg: Any) -> None:
    """Refuse a target whose layers have no torch implementation here, and adapters.

    Args:
        model_config: SGLang's ``ModelConfig`` of the target.
        cfg: server arguments, read by attribute.

    Raises:
        DFlashError: for a quantised checkpoint or KV cache, latent attention, recurrent layers other than
            gated-delta-net, encoder-decoder models, and LoRA.
    """
    from sglang_dflash.upstream import AttentionArch, hybrid_gdn_config, mambaish_config

    name = ", ".join(model_config.hf_config.architectures or ["unnamed"])
    attention = model_config.attention_arch
    other_recurrence = mambaish_config(model_config) is not None and hybrid_gdn_config(model_config) is None
    scheme = cfg.quantization or quantization(model_config.hf_config.to_dict())
    _refuse(
        (attention != AttentionArch.MHA, f"{name} uses {attention.name} attention", _DECODERS, _GPU),
        (other_recurrence, f"{name} has recurrent layers other than gated-delta-net", _DECODERS, _GPU),
        (model_config.is_encoder_decoder, f"{name} is an encoder-decoder model", _DECODERS, _GPU),
        (
            scheme not in _PLAIN,
            f"{name} with {scheme} quantisation on a CPU",
            "an unquantised checkpoint: float32, bfloat16 or float16",
            "use the checkpoint's unquantised version here, or " + _GPU,
        ),
        (
            cfg.kv_cache_dtype not in _KV_DTYPES,
            f"--kv-cache-dtype {cfg.kv_cache_dtype} on a CPU",
            f"one of {', '.join(_KV_DTYPES)}",
            "leave it out: the KV cache then has the model's dtype",
        ),
        (
            bool(cfg.enable_lora or cfg.lora_paths),
            f"{'--lora-paths' if cfg.lora_paths else '--enable-lora'} on a CPU",
            "a server without adapters: SGLang's LoRA layers take pinned memory, which needs an accelerator",
            "merge the adapter into the checkpoint, or serve it on a GPU",
        ),
    )


def check_drafter(cfg: Any) -> None:
    """Refuse quantised layers for the drafter.

    Raises:
        DFlashError: the command line asks for some.
    """
    scheme = cfg.speculative_draft_model_quantization
    _refuse(
        (
            cfg.speculative_draft_model_path is not None and scheme not in _PLAIN,
            f"--speculative-draft-model-quantization {scheme} on a CPU",
            "plain layers: float32, bfloat16 or float16",
            "leave it out: a quantised drafter is dequantised when it is loaded",
        )
    )


def _is_missing_path(model_path: str) -> bool:
    """Whether ``model_path`` is written like a local path and nothing is there: SGLang would ask a model hub for it."""
    looks_local = model_path.startswith(("/", "./", "../", "~")) or model_path.count("/") > 1
    return looks_local and "://" not in model_path and not Path(model_path).expanduser().exists()


def _refuse(*rules: Rule) -> None:
    for refused, value, expected, remedy in rules:
        if refused:
            raise DFlashError(value, expected=expected, remedy=remedy)
