"""The published configurations, every structural key kept and every size shrunk (``shrunk_cards.py`` says which)."""

from __future__ import annotations

import copy
from typing import Any

VOCAB, HIDDEN, HEAD, CONTEXT = 1024, 64, 32, 4096
TARGET_LAYERS = 12  # three repetitions of the 3:1 pattern; room for eight captured layers
DRAFTER_LAYERS = 3
WINDOW = 32
EOS = 2  # of the tokenizer that `train_tokenizer` makes


def shrink_target(published: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(published)
    text = config.get("text_config", config)
    shift = VOCAB - text["vocab_size"]
    kv_heads = 2  # two, so that tensor parallelism could divide them
    key_heads = 2
    text.update(
        num_attention_heads=kv_heads * text["num_attention_heads"] // text["num_key_value_heads"],
        num_key_value_heads=kv_heads,
        linear_num_value_heads=key_heads * text["linear_num_value_heads"] // text["linear_num_key_heads"],
        linear_num_key_heads=key_heads,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        head_dim=HEAD,
        hidden_size=HIDDEN,
        num_hidden_layers=TARGET_LAYERS,
        layer_types=text["layer_types"][:TARGET_LAYERS],
        max_position_embeddings=CONTEXT,
        vocab_size=VOCAB,
    )
    for key, size in {"intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 16}.items():
        if key in text:
            text[key] = size
    if "shared_expert_intermediate_size" in text:
        text["shared_expert_intermediate_size"] = 32
    for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        if key in config:
            config[key] += shift
    text.update(eos_token_id=EOS, bos_token_id=None)
    if "rope_parameters" in text:
        text["rope_parameters"]["mrope_section"] = [2, 1, 1]  # half of the turned quarter of a head
    if "vision_config" in config:
        config["vision_config"].update(
            depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=HIDDEN
        )
        config["vision_config"]["num_position_embeddings"] = 64
    return config


def shrink_drafter(published: dict[str, Any], target: Any) -> dict[str, Any]:
    config = copy.deepcopy(published)
    kv_heads = 2
    config.update(
        num_attention_heads=kv_heads * config["num_attention_heads"] // config["num_key_value_heads"],
        num_key_value_heads=kv_heads,
        head_dim=HEAD,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=DRAFTER_LAYERS,
        num_target_layers=TARGET_LAYERS,
        # The last layers: a drafter that mixes both kinds ends with its full one.
        layer_types=config["layer_types"][-DRAFTER_LAYERS:],
        max_position_embeddings=CONTEXT,
        vocab_size=VOCAB,
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
