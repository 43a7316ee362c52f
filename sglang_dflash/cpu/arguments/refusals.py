"""What the CPU platform cannot serve, refused in the launching process before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dflash.cpu.layers.attention import NAME as ATTENTION
from sglang_dflash.drafter.config import quantization
from sglang_dflash.errors import DFlashError

_ATTENTION_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_KV_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32")


def check_model_path(model_path: str) -> None:
    """Refuse a local path that does not exist, rather than ask a model hub for it.

    Raises:
        DFlashError: if ``model_path`` is written like a path and nothing is there.
    """
    looks_local = model_path.startswith(("/", "./", "../", "~")) or model_path.count("/") > 1
    if looks_local and "://" not in model_path and not Path(model_path).expanduser().exists():
        raise DFlashError(
            f"--model-path {model_path} does not exist",
            expected="a checkpoint folder on this machine, or a hub id of the form owner/name",
            remedy="check the path; `sglang-dflash pairs path tiny-hybrid` prints that of a model which ships here",
        )


def check_backend_names(cfg: Any, known: list[str]) -> None:
    """Refuse an attention backend that SGLang does not know (argparse does so on a command line, ``Engine`` does not).

    Args:
        cfg: server arguments, read by attribute.
        known: SGLang's list of attention backends, ours included.

    Raises:
        DFlashError: naming the argument and the backend.
    """
    for field in _ATTENTION_FIELDS:
        value = getattr(cfg, field)
        if value is not None and value not in known:
            raise DFlashError(
                f"{field}={value!r}",
                expected=f"one of {', '.join(sorted(known))}",
                remedy=f"leave it out: the CPU platform serves every model with {ATTENTION}",
            )


def check_model(model_config: Any, cfg: Any) -> None:
    """Refuse a checkpoint whose layers have no torch implementation here.

    Args:
        model_config: SGLang's ``ModelConfig`` of the target.
        cfg: server arguments, read by attribute.

    Raises:
        DFlashError: for a quantised checkpoint or KV cache, latent attention, recurrent layers other than
            gated-delta-net, and encoder-decoder models.
    """
    from sglang_dflash.upstream import AttentionArch, hybrid_gdn_config, mambaish_config

    architecture = ", ".join(model_config.hf_config.architectures or ["unnamed"])
    expected = "dense, MoE or gated-delta-net hybrid decoders with grouped-query attention"
    gpu = "serve it on a GPU, where this platform stays out of the way"
    if model_config.attention_arch != AttentionArch.MHA:
        kind = model_config.attention_arch.name
        raise DFlashError(f"{architecture} uses {kind} attention", expected=expected, remedy=gpu)
    if mambaish_config(model_config) is not None and hybrid_gdn_config(model_config) is None:
        raise DFlashError(
            f"{architecture} has recurrent layers other than gated-delta-net", expected=expected, remedy=gpu
        )
    if model_config.is_encoder_decoder:
        raise DFlashError(f"{architecture} is an encoder-decoder model", expected=expected, remedy=gpu)
    scheme = cfg.quantization or _checkpoint_quantization(model_config.hf_config)
    if scheme not in (None, "unquant"):
        raise DFlashError(
            f"{architecture} with {scheme} quantisation on a CPU",
            expected="an unquantised checkpoint: float32, bfloat16 or float16",
            remedy="use the checkpoint's unquantised version here, or " + gpu,
        )
    if cfg.kv_cache_dtype not in _KV_DTYPES:
        raise DFlashError(
            f"--kv-cache-dtype {cfg.kv_cache_dtype} on a CPU",
            expected=f"one of {', '.join(_KV_DTYPES)}",
            remedy="leave it out: the KV cache then has the model's dtype",
        )


def check_adapters(cfg: Any) -> None:
    """Refuse LoRA adapters.

    Raises:
        DFlashError: the command line asks for them.
    """
    if cfg.enable_lora or cfg.lora_paths:
        raise DFlashError(
            f"{'--lora-paths' if cfg.lora_paths else '--enable-lora'} on a CPU",
            expected="a server without adapters: SGLang's LoRA layers take pinned memory, which needs an accelerator",
            remedy="merge the adapter into the checkpoint, or serve it on a GPU",
        )


def check_drafter_quantization(cfg: Any) -> None:
    """Refuse a quantised drafter.

    Raises:
        DFlashError: its checkpoint or the command line names a quantisation.
    """
    from sglang_dflash.drafter.served import published_config

    if cfg.speculative_draft_model_path is None:
        return
    published = published_config(cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision)
    scheme = cfg.speculative_draft_model_quantization or quantization(published)
    if scheme not in (None, "unquant"):
        raise DFlashError(
            f"a drafter with {scheme} quantisation on a CPU",
            expected="an unquantised drafter: float32, bfloat16 or float16",
            remedy="use the drafter's unquantised version here, or serve the pair on a GPU",
        )


def _checkpoint_quantization(hf_config: Any) -> str | None:
    declared = getattr(hf_config, "quantization_config", None)
    if declared is None:
        return None
    if not isinstance(declared, dict):
        declared = declared.to_dict()
    return str(declared.get("quant_method", "an unnamed scheme of"))
