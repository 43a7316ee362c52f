"""A launch that cannot work ends the process before it loads weights, with one error that says why.

One process shows it in `make test`; the same errors without a process: tests/check, tests/cpu, tests/plan.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from sglang_dflash.pairs import target_path
from tests.support.broken_pairs import BROKEN, write_pair
from tests.support.pair_servers import changed_drafter, draft_arguments, plain_server, target_arguments
from tests.support.servers import run_to_exit

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
Launch = Callable[[Path], tuple[str, ...]]
MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    **dict.fromkeys(("hidden_size",), 64),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **{"num_hidden_layers": 2, "kv_lora_rank": 32, "vocab_size": 128, "max_position_embeddings": 256},
}


def dflash(*flags: str) -> Launch:
    return lambda _: (*target_arguments(PAIR), *draft_arguments(PAIR), *flags)


def widths(config: dict[str, Any], *flags: str) -> Launch:
    def arguments(folder: Path) -> tuple[str, ...]:
        (folder / "widths.json").write_text(json.dumps(config))
        return (*dflash(*flags)(folder), "--speculative-adaptive-config", str(folder / "widths.json"))

    return arguments


def broken(name: str) -> Launch:
    (found,) = (pair for pair in BROKEN if pair.name == name)

    def arguments(folder: Path) -> tuple[str, ...]:
        write_pair(folder, found)
        pair = ("--model-path", str(folder / "target"), "--speculative-draft-model-path", str(folder / "drafter"))
        return (*pair, "--speculative-algorithm", "DFLASH", *found.flags)

    return arguments


def target_config(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    shutil.copytree(target_path(PAIR), folder / "target")
    (folder / "target" / "config.json").write_text(json.dumps(config))
    return ("--model-path", str(folder / "target"), "--skip-tokenizer-init")


def quantised(folder: Path) -> tuple[str, ...]:
    config = json.loads((target_path(PAIR) / "config.json").read_text())
    return target_config(folder, {**config, "quantization_config": {"quant_method": "fp8"}})


def misfitting_tensors(folder: Path) -> tuple[str, ...]:
    drafter = changed_drafter(PAIR, folder)
    (weights,) = drafter.glob("*.safetensors")
    tensors = safetensors.torch.load_file(weights)
    del tensors["layers.0.self_attn.q_norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    tensors["extra.weight"] = tensors["norm.weight"].clone()
    safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    return (*target_arguments(PAIR), *draft_arguments(PAIR, drafter))


ADAPTIVE = "--speculative-adaptive"
QUICK = "mask token"
CASES: dict[str, tuple[Launch, tuple[str, ...]]] = {
    QUICK: (broken('drafter mask_token_id "<|MASK|>"'), ("mask_token_id is '<|MASK|>'",)),
    "two block sizes": (broken("two block sizes"), ("--speculative-dflash-block-size 8",)),
    "drafter of another kind": (
        lambda folder: (
            *dflash()(folder),
            *draft_arguments(PAIR, changed_drafter(PAIR, folder, projector_type="domino")),
        ),
        ("Domino",),
    ),
    "misfitting tensors": (
        misfitting_tensors,
        (
            "missing: fc.weight, layers.0.self_attn.q_norm.weight",
            "unexpected: extra.weight",
            "mis-shaped: fc.weight",
        ),
    ),
    "short ring": (dflash("--linear-replayssm-cache-len", "8"), ("a power of two, at least 16 for blocks of 16",)),
    "width over the block": (widths({"widths": [1, 32]}, ADAPTIVE), ("width 32",)),
    "unknown width key": (widths({"width": [1]}, ADAPTIVE), ('key "width"',)),
    "widths without their flag": (widths({}), ("without --speculative-adaptive",)),
    "no such model": (lambda _: ("--model-path", "/no/such/folder"), ("/no/such/folder", "Expected:")),
    "quantised target on a CPU": (quantised, ("fp8", "Expected:")),
    "MLA on a CPU": (lambda folder: target_config(folder, MLA), ("DeepseekV2ForCausalLM", "MLA")),
}


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_process_ends_with_the_error(name: str, tmp_path: Path) -> None:
    arguments, said = CASES[name]
    status, printed = run_to_exit(*arguments(tmp_path), timeout=120)
    assert status not in (0, None)
    for words in (*said, "Remedy"):
        assert words in printed
    assert "Load weight" not in printed


@pytest.mark.slow
def test_an_unknown_word_in_the_switch_is_refused(tmp_path: Path) -> None:
    status, printed = run_to_exit(*dflash()(tmp_path), SGLANG_DFLASH="off")
    assert status != 0
    assert "SGLANG_DFLASH='off'" in printed


@pytest.mark.slow
def test_plain_decoding_is_left_alone(tmp_path: Path) -> None:
    with plain_server(PAIR, tmp_path) as server:
        assert "sglang_dflash" not in server.get("/server_info").json()["internal_states"][0]
        assert "serves DFLASH" not in server.log
