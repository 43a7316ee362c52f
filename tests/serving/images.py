"""Tiny random vision-language targets with a drafter each, prompts with pictures, and what transformers makes of both.

The processor is built here, so that a server needs nothing from the hub: the tiny pairs' tokenizer with Qwen's vision
tokens, Qwen's image processor, and a chat template that puts an image where the message has it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.train.drafter import Drafter
from sglang_dflash_lab.train.reference_decoder import DrafterRun
from tests.support.checkpoints import COMMON, EXPERTS, GDN, MROPE, spread_weights, write_drafter
from tests.support.servers import Server

HYBRIDS = ("qwen3_5", "qwen3_5_moe")
BLOCK, EOS, MASK = 8, 2, 3  # tokens of the tiny pairs' tokenizer, which has 1,024
VISION_TOKENS = {
    "vision_start": ("<|vision_start|>", 1024),
    "vision_end": ("<|vision_end|>", 1025),
    "image": ("<|image_pad|>", 1026),
    "video": ("<|video_pad|>", 1027),
}
IMAGE_TOKEN = VISION_TOKENS["image"][1]
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PATCH, MERGE = 16, 2
TOKEN_PIXELS = PATCH * MERGE  # side of the square of pixels that becomes one image token
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}" + PLACEHOLDER + "{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
_TEXT = {**COMMON, "vocab_size": 1088, "max_position_embeddings": 4096}
_TEXT |= {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": 0}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "out_hidden_size": COMMON["hidden_size"],
    "num_position_embeddings": 64,
}
_NO_DEEPSTACK: dict[str, Any] = {"deepstack_visual_indexes": []}  # as published; SGLang assumes three
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
# Name -> transformers' stem, the text model's keys, the vision tower's. Qwen3-VL's tower also feeds two layers of the
# text model (deepstack).
_SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", {**GDN, **MROPE}, _NO_DEEPSTACK),
    "qwen3_5_moe": ("Qwen3_5Moe", {**GDN, **MROPE, **EXPERTS}, _NO_DEEPSTACK),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": _ROPE}, {"deepstack_visual_indexes": [0, 1]}),
}
# Two logits of about 3 this close are equal but for the order of sums: random weights come within 5e-6.
ROUNDING = 2e-5


def write_target(name: str, folder: Path) -> transformers.PreTrainedModel:
    stem, text, vision = _SHAPES[name]
    torch.manual_seed(0)
    ids = {f"{token}_token_id": number for token, (_, number) in VISION_TOKENS.items()}
    config = getattr(transformers, f"{stem}Config")(
        text_config={**_TEXT, **text}, vision_config={**_VISION, **vision}, tie_word_embeddings=False, **ids
    )
    model = spread_weights(getattr(transformers, f"{stem}ForConditionalGeneration")(config))
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return model


def processor() -> transformers.ProcessorMixin:
    """Build a processor for images of one token or more, whose sides it rounds to whole tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path("tiny-hybrid"))
    tokenizer.add_special_tokens({"additional_special_tokens": [text for text, _ in VISION_TOKENS.values()]})
    area = {"shortest_edge": TOKEN_PIXELS**2, "longest_edge": 256 * TOKEN_PIXELS**2}
    image = transformers.Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, size=area)
    video = transformers.Qwen3VLVideoProcessor(patch_size=PATCH, merge_size=MERGE)
    return transformers.Qwen3VLProcessor(image, tokenizer, video, chat_template=CHAT_TEMPLATE)


def drafter_for_images(folder: Path) -> Drafter:
    shared = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    same = {key: _TEXT[key] for key in (*shared, "vocab_size", "max_position_embeddings", "eos_token_id")}
    layers = {"target_layer_ids": (0, 2), "num_target_layers": _TEXT["num_hidden_layers"]}
    return write_drafter(folder, **same, **layers, block_size=BLOCK, mask_token_id=MASK)


@dataclass(frozen=True)
class Picture:
    """Noise of ``columns`` by ``rows`` image tokens; another ``seed`` is another picture."""

    columns: int
    rows: int
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.columns * self.rows

    @property
    def image(self) -> Image.Image:
        shape = (self.rows * TOKEN_PIXELS, self.columns * TOKEN_PIXELS, 3)
        return Image.fromarray(np.random.default_rng(self.seed).integers(0, 256, shape, dtype=np.uint8))

    @property
    def url(self) -> str:
        file = io.BytesIO()
        self.image.save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


Prompt = Sequence[str | Picture]


def text_of(prompt: Prompt) -> str:
    return "".join(part if isinstance(part, str) else PLACEHOLDER for part in prompt)


def pictures_of(prompt: Prompt) -> list[Picture]:
    return [part for part in prompt if isinstance(part, Picture)]


def inputs_of(prompt: Prompt, processor: transformers.ProcessorMixin) -> Any:
    """Return a model's inputs, with every image token present, [1, T]."""
    images = [picture.image for picture in pictures_of(prompt)]
    return processor(text=[text_of(prompt)], images=images or None, return_tensors="pt")


def generate(server: Server, prompts: Sequence[Prompt], max_new_tokens: int, names: Sequence[str]) -> list[Any]:
    """Send one ``/generate`` request with every prompt; ``names`` are their request ids."""
    body: dict[str, Any] = {
        "rid": list(names),
        "text": [text_of(prompt) for prompt in prompts],
        "image_data": [[picture.url for picture in pictures_of(prompt)] for prompt in prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
    }
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    answers: list[Any] = response.json()
    return answers


def chat(server: Server, prompt: Prompt, max_tokens: int) -> str:
    """Return the answer's text to one user message."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.url}}
        for part in prompt
    ]
    body: dict[str, Any] = {"model": "served", "messages": [{"role": "user", "content": content}]}
    body |= {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


class Reading:
    """A prompt and its answer read by transformers in one pass: greedy tokens, and the drafter's context features.

    Args:
        model: the target; its own code finds the M-RoPE positions.
        answer: tokens.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        processor: transformers.ProcessorMixin,
        drafter: Drafter,
        prompt: Prompt,
        answer: Sequence[int],
    ) -> None:
        self._model, self._drafter = model, drafter
        inputs = inputs_of(prompt, processor)
        ids = torch.cat((inputs["input_ids"], torch.tensor([list(answer)])), dim=1)
        self.tokens: list[int] = ids[0].tolist()
        self.is_image = ids == IMAGE_TOKEN
        pixels = {key: inputs[key] for key in ("pixel_values", "image_grid_thw") if key in inputs}
        places, _ = model.model.get_rope_index(
            ids, mm_token_type_ids=self.is_image.int(), image_grid_thw=pixels.get("image_grid_thw")
        )
        self.rope_positions = places[0, 0]  # of time, which stands still in an image
        features: list[Tensor] = []
        layers = model.model.language_model.layers
        hooks = [
            # What enters the next layer, deepstack's part included.
            layers[i + 1].register_forward_pre_hook(
                lambda _, args, kwargs: features.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
            for i in drafter.config.target_layer_ids
        ]
        with torch.inference_mode():
            logits = model(input_ids=ids, mm_token_type_ids=self.is_image.int(), **pixels).logits
        for hook in hooks:
            hook.remove()
        self.greedy: list[int] = logits[0, -len(answer) - 1 : -1].argmax(-1).tolist()
        self.features = torch.cat(features, dim=-1)

    def drafts(
        self, position: int, width: int, window: int | None = None, *, rope: bool = False, blind: bool = False
    ) -> list[set[int]]:
        """Return the drafter's proposals after the token at ``position``: the likeliest tokens, two where they tie.

        Args:
            window: the draft window, tokens.
            rope: count context tokens as the target's rotation does, which is wrong.
            blind: leave out the image tokens' hidden states, which is wrong too.
        """
        target = SimpleNamespace(
            model=self._model.model.language_model, lm_head=self._model.lm_head, device=self._model.device
        )
        run = DrafterRun(self._drafter, target, window)
        features = self.features[:, :position]
        if blind:
            features = features.masked_fill(self.is_image[:, :position, None], 0.0)
        places = self.rope_positions[:position] if rope else torch.arange(position)
        with torch.inference_mode():
            run.context = self._drafter.context_key_values(features, places[None])
            run.length = position
            logits = target.lm_head(run.block_hidden(self.tokens[position], width)[1:])
        return [set((row > row.max() - ROUNDING).nonzero().flatten().tolist()) for row in logits]
