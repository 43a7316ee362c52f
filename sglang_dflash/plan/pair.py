"""The two models of a pair, and server arguments as SGLang will resolve them, for readers that come before.

``args`` is anything with SGLang's argument names as attributes; unset ones are None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.drafter.checkpoint import ModelFiles, parse_object
from sglang_dflash.drafter.config import DrafterConfig, text_config
from sglang_dflash.plan.copies import copies_asked_for
from sglang_dflash.plan.machine import Machine
from sglang_dflash.width.config import asked_for

PLAIN_LAYERS = "unquant"  # of --speculative-draft-model-quantization


@dataclass(frozen=True)
class Pair:
    """Target and drafter.

    Attributes:
        target, drafter: the target's ``config.json`` and the drafter's parsed one, ``--json-model-override-args``
            applied to both, as SGLang does.
        target_files, drafter_files: where the other small files and the headers are read from.
    """

    target: Mapping[str, Any]
    drafter: DrafterConfig
    target_files: ModelFiles
    drafter_files: ModelFiles


def drafter_files(args: Any) -> ModelFiles:
    """The drafter that server arguments name."""
    dequantise = args.speculative_draft_model_quantization in (None, PLAIN_LAYERS)
    return ModelFiles(args.speculative_draft_model_path, args.speculative_draft_model_revision, dequantise)


def read_pair(args: Any) -> Pair:
    """The pair that server arguments name.

    Raises:
        DFlashError: a configuration cannot be read, or is none of a plain DFlash drafter.
    """
    own, targets = drafter_files(args), ModelFiles(args.model_path, args.revision)
    overrides = parse_object(args.json_model_override_args, "--json-model-override-args")
    drafter = DrafterConfig.from_dict({**own.config, **overrides})
    return Pair({**targets.config, **overrides}, drafter, targets, own)


_BLOCK = 16  # SGLang's, where neither a flag nor the drafter says


def asked_block(args: Any) -> int | None:
    """Block size that the flags ask for, tokens; None if they do not."""
    return args.speculative_num_draft_tokens or args.speculative_dflash_block_size


def block_size(args: Any, drafter: DrafterConfig) -> int:
    """Positions of the widest block, anchor included."""
    return asked_block(args) or drafter.block_size or _BLOCK


def copies_fill_blocks(args: Any) -> bool:
    """Whether a block may be wider than the drafter's: widths are chosen for each step, and copies are offered.

    Raises:
        DFlashError: the width file or the switch of copies is unusable.
    """
    widths = asked_for(args)
    return widths is not None and copies_asked_for(widths)


def page_size(args: Any) -> int:
    """Tokens of a KV page: ``--page-size``, or what the attention backend forces."""
    backends = {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend}
    if "trtllm_mha" in backends | {args.speculative_draft_attention_backend}:
        return args.page_size if args.page_size in (16, 32, 64, 128) else 64
    return args.page_size or (128 if "fa4" in backends else 1)


def served_dtype(target: Mapping[str, Any], dtype: str) -> str:
    """The dtype SGLang computes in: its ``auto`` serves float32 checkpoints in float16."""
    if dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(dtype, dtype)
    text = text_config(target)
    stated = text.get("dtype") or text.get("torch_dtype") or target.get("dtype")
    return "float16" if stated in (None, "float32") else str(stated)


def needs_bfloat16_states(args: Any, machine: Machine) -> bool:
    """Whether SGLang would refuse these arguments for lack of ``--mamba-ssm-dtype bfloat16``."""
    return args.mamba_ssm_dtype is None and flashinfer_states(args, machine) is not None


def flashinfer_states(args: Any, machine: Machine) -> str | None:
    """The flag that puts bfloat16-only FlashInfer kernels on the recurrent states; None if they are not used."""
    decode = "--linear-attn-decode-backend" if args.linear_attn_decode_backend else "--linear-attn-backend"
    backends = {
        decode: args.linear_attn_decode_backend or args.linear_attn_backend,
        "--linear-attn-verify-backend": args.linear_attn_verify_backend,
    }
    return next((flag for flag, name in backends.items() if machine.is_blackwell and name == "flashinfer"), None)
