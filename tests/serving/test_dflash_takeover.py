"""What DFLASH is asked for and our worker cannot serve is refused by name; plain decoding is left alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch

from sglang_dflash.pairs import drafter_path
from tests.support.pair_servers import draft_arguments, plain_server, target_arguments
from tests.support.servers import run_to_exit

pytestmark = pytest.mark.engine

PAIR = "tiny-dense"


def start(drafter: Path, *arguments: str, **environment: str) -> str:
    """Start a server that is expected to refuse; everything it printed."""
    command = (*target_arguments(PAIR), *draft_arguments(PAIR), "--speculative-draft-model-path", str(drafter))
    code, output = run_to_exit(*command, *arguments, **environment)
    assert code != 0
    return output


def changed_drafter(folder: Path, **changes: object) -> Path:
    """A copy of the drafter with other keys in its config.json."""
    copy = Path(shutil.copytree(drafter_path(PAIR), folder / "drafter"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


@pytest.mark.slow
def test_plain_decoding_is_left_alone(tmp_path: Path) -> None:
    with plain_server(PAIR, tmp_path) as server:
        assert "sglang_dflash" not in server.get("/server_info").json()["internal_states"][0]
        assert "serves DFLASH" not in server.log


@pytest.mark.slow  # a quick one without a process: "Domino" in tests/check/test_broken_pairs.py
def test_another_kind_of_drafter_is_refused_by_name(tmp_path: Path) -> None:
    output = start(changed_drafter(tmp_path, projector_type="domino"))
    assert "Domino" in output


def test_an_unknown_word_in_the_switch_is_refused() -> None:
    output = start(drafter_path(PAIR), SGLANG_DFLASH="off")
    assert "SGLANG_DFLASH='off'" in output


def test_misfitting_tensors_are_named(tmp_path: Path) -> None:
    copy = changed_drafter(tmp_path)
    (weights,) = copy.glob("*.safetensors")
    tensors = safetensors.torch.load_file(weights)
    del tensors["layers.0.self_attn.q_norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    tensors["extra.weight"] = tensors["norm.weight"].clone()
    safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    output = start(copy)
    assert "missing: fc.weight, layers.0.self_attn.q_norm.weight" in output
    assert "unexpected: extra.weight" in output
    assert "mis-shaped: fc.weight" in output
