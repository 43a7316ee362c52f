"""Servers with the dimensions of the five published pairs, random weights and simulated accept lengths."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.servers import Server, running
from tests.support.shrunk_configs import shrink_drafter, shrink_target
from tools.gpu.run_step import Run
from tools.gpu.unpack import FAKE

CARDS = Path(__file__).parents[2] / "tests/fixtures/cards"
PAIRS = ("Qwen3.5-4B", "Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3-Coder-Next")
BLOCK, ACCEPT = 16, 4
ARMS = {"ours": "", "builtin": "builtin"}  # -> SGLANG_DFLASH
DUMMY = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16", "--speculative-algorithm", "DFLASH"),
    *("--speculative-draft-load-format", "dummy", "--speculative-num-draft-tokens", str(BLOCK)),
)


def cells(run: Run, pairs: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(pair, arm) to measure; on a CPU SGLang's own worker needs a shim, and is left out."""
    yield from ((pair, arm) for pair in run.pairs or pairs for arm in ARMS if run.real or arm == "ours")


@contextlib.contextmanager
def serve(run: Run, pair: str, arm: str, requests: int | None, *flags: str) -> Iterator[Server]:
    """A server of at most ``requests`` running requests; None for what ``flags`` or SGLang say."""
    environment = {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT), "SGLANG_DFLASH": ARMS[arm]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(pair, folder, run.layers, shrunk=run.device == FAKE)
        models = ("--model-path", str(folder / "target"), "--speculative-draft-model-path", str(folder / "drafter"))
        limit = () if requests is None else ("--max-running-requests", str(requests))
        with running(folder, *models, *DUMMY, *limit, *flags, *run.flags(speculative=True), **environment) as server:
            yield server


def write(pair: str, folder: Path, layers: int = 0, *, shrunk: bool = False) -> None:
    """Write ``folder/target`` and ``folder/drafter`` with a ``config.json`` each.

    Args:
        layers: depth to cut the target to, a multiple of its pattern's length; 0 for the published one.
        shrunk: the structure alone, at sizes that an interpreter can run.
    """
    files = (CARDS / pair / model / "config.json" for model in ("target", "drafter"))
    target, drafter = (json.loads(file.read_text()) for file in files)
    if shrunk:
        target, drafter = shrink_target(target), shrink_drafter(drafter, target.get("text_config", target))
        layers = 8 if len(drafter["dflash_config"]["target_layer_ids"]) < 7 else 0
    if layers:
        target, drafter = cut(target, drafter, layers)
    for model, config in (("target", text_model(target)), ("drafter", drafter)):
        (folder / model).mkdir(parents=True, exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(config))


def text_model(config: dict[str, Any]) -> dict[str, Any]:
    """A target without its vision part, whose image processor the wheelhouse leaves out."""
    if "text_config" not in config:
        return config
    names = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in config["architectures"]]
    return {
        **config["text_config"],
        "architectures": names,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }


def cut(target: dict[str, Any], drafter: dict[str, Any], layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configurations for the target's first ``layers`` layers; the drafter reads layers at the same relative depth."""
    target, drafter = copy.deepcopy(target), copy.deepcopy(drafter)
    text = target.get("text_config", target)
    published, text["num_hidden_layers"] = text["num_hidden_layers"], layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    ids: list[int] = []
    for layer in drafter["dflash_config"]["target_layer_ids"]:
        scaled = layer * (layers - 1) // (published - 1)
        ids.append(max(scaled, ids[-1] + 1) if ids else scaled)  # ascending: those that fall together move up
    drafter["dflash_config"]["target_layer_ids"] = ids
    if "num_target_layers" in drafter:
        drafter["num_target_layers"] = layers
    return target, drafter
