"""Prompts with pictures in them, what a server answers, and what transformers makes of the same."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from sglang_dflash_lab.train.drafter import Drafter
from tests.support.reference_decoder import DrafterRun
from tests.support.servers import Server
from tests.support.vision_pair import IMAGE_TOKEN, PLACEHOLDER, TOKEN_PIXELS

# How near to the largest two logits of about 3 are equal but for the order of sums: random weights come within 5e-6.
ROUNDING = 2e-5


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
    """What a model takes: every image token is there, [1, T]."""
    images = [picture.image for picture in pictures_of(prompt)]
    return processor(text=[text_of(prompt)], images=images or None, return_tensors="pt")


def tokens_of(prompt: Prompt, processor: transformers.ProcessorMixin) -> list[int]:
    found: list[int] = inputs_of(prompt, processor)["input_ids"][0].tolist()
    return found


def generate(
    server: Server, prompts: Sequence[Prompt], max_new_tokens: int, names: Sequence[str] = (), **sampling: Any
) -> list[dict[str, Any]]:
    """One ``/generate`` request with every prompt.

    Args:
        names: request ids, made unique by what follows a slash.
    """
    body: dict[str, Any] = {
        "text": [text_of(prompt) for prompt in prompts],
        "image_data": [[picture.url for picture in pictures_of(prompt)] for prompt in prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling},
    }
    response = server.post("/generate", body | ({"rid": list(names)} if names else {}))
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()
    return answers


def chat(server: Server, prompt: Prompt, max_tokens: int) -> str:
    """The answer's text to one user message."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.url}}
        for part in prompt
    ]
    body = {
        "model": "served",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


class Reading:
    """A prompt and its answer read by transformers in one pass: greedy tokens, and what the drafter is told.

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
        """The drafter's proposals after the token at ``position``: the likeliest tokens, two where rounding decides.

        Args:
            window: the draft window, tokens.
            rope: count context tokens as the target's rotation does, which is wrong.
            blind: leave the image tokens' hidden states out, which is wrong too.
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
