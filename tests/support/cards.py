"""The published cards: their commands as argument lists, and their configurations with every size shrunk.

Shrinking keeps every structural key: architecture, the linear/full pattern, experts and how many serve a token, GQA
ratios, linear value heads per key head, the drafter's layer types, causality, RoPE scaling, number and spacing of
captured layers, the mask token's distance from the end of the vocabulary.
"""

from __future__ import annotations

import copy
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "fixtures" / "cards"
NAMES = sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())
VOCAB, HIDDEN, HEAD, CONTEXT = 1024, 64, 32, 4096
TARGET_LAYERS, DRAFTER_LAYERS = 12, 3  # three repetitions of the 3:1 pattern; room for eight captured layers
KV_HEADS = KEY_HEADS = 2  # divisible by two tensor-parallel ranks
WINDOW = 32
EOS = 2  # of the tokenizer that `train_tokenizer` makes
_SIZES = {"intermediate_size": 128, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_SIZES |= {"num_experts": 16}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 64}


@dataclass(frozen=True)
class Card:
    """One published pair: what its card exports and what it runs."""

    environment: dict[str, str]
    arguments: list[str]

    def arguments_for(self, target: Path | str, drafter: Path | str) -> list[str]:
        """The card's arguments with local models in place of the two hub ids."""
        places = {"--model-path": str(target), "--speculative-draft-model-path": str(drafter)}
        arguments = list(self.arguments)
        for flag, place in places.items():
            arguments[arguments.index(flag) + 1] = place
        return arguments


def card(name: str) -> Card:
    """Read ``command.txt``: ``export`` lines, then one ``python -m sglang.launch_server``."""
    text = (FOLDER / name / "command.txt").read_text().replace("\\\n", " ")
    environment: dict[str, str] = {}
    arguments: list[str] = []
    for line in filter(None, text.splitlines()):
        words = shlex.split(line)
        if words[0] == "export":
            variable, _, value = words[1].partition("=")
            environment[variable] = value
        else:
            assert words[:3] == ["python", "-m", "sglang.launch_server"]
            arguments = words[3:]
    return Card(environment, arguments)


def shrink_target(published: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(published)
    text = config.get("text_config", config)
    shift = VOCAB - text["vocab_size"]
    text |= {key: size for key, size in _SIZES.items() if key in text}
    text.update(
        **_shrunk_attention(text),
        linear_num_value_heads=KEY_HEADS * text["linear_num_value_heads"] // text["linear_num_key_heads"],
        linear_num_key_heads=KEY_HEADS,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_hidden_layers=TARGET_LAYERS,
        layer_types=text["layer_types"][:TARGET_LAYERS],
        eos_token_id=EOS,
        bos_token_id=None,
    )
    for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        if key in config:
            config[key] += shift
    if "rope_parameters" in text:
        text["rope_parameters"]["mrope_section"] = [2, 1, 1]  # half of the rotated quarter of a head
    if "vision_config" in config:
        config["vision_config"] |= {**_VISION, "out_hidden_size": HIDDEN}
    return config


def shrink_drafter(published: dict[str, Any], target: Any) -> dict[str, Any]:
    config = copy.deepcopy(published)
    config.update(
        **_shrunk_attention(config),
        intermediate_size=128,
        num_hidden_layers=DRAFTER_LAYERS,
        num_target_layers=TARGET_LAYERS,
        # A drafter that mixes both kinds of layers ends with its full-attention layer.
        layer_types=config["layer_types"][-DRAFTER_LAYERS:],
    )
    if config.get("sliding_window"):
        config["sliding_window"] = WINDOW
    if config.get("rope_scaling"):
        config["rope_scaling"]["original_max_position_embeddings"] = CONTEXT // 64
    dflash = config["dflash_config"]
    dflash["mask_token_id"] += VOCAB - target["vocab_size"]
    count = len(dflash["target_layer_ids"])
    dflash["target_layer_ids"] = [1 + round(i * (TARGET_LAYERS - 4) / (count - 1)) for i in range(count)]
    return config


def write_text_configs(pair: str, folder: Path, *, shrunk: bool) -> None:
    """Write ``config.json`` to ``folder/target``, without its vision part, and to ``folder/drafter``.

    Args:
        shrunk: keep the structure only, at sizes that a CPU can run.
    """
    target, drafter = (json.loads((FOLDER / pair / each / "config.json").read_text()) for each in ("target", "drafter"))
    if shrunk:
        target, drafter = shrink_target(target), shrink_drafter(drafter, target["text_config"])
    names = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in target["architectures"]]
    tied = target.get("tie_word_embeddings", False)
    text = {**target["text_config"], "architectures": names, "tie_word_embeddings": tied}
    for model, config in (("target", text), ("drafter", drafter)):
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text(json.dumps(config))


def _shrunk_attention(config: dict[str, Any]) -> dict[str, Any]:
    heads = KV_HEADS * config["num_attention_heads"] // config["num_key_value_heads"]
    sizes = {"hidden_size": HIDDEN, "head_dim": HEAD, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": KV_HEADS}
