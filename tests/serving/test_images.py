"""Prompts with images: the target's answers, and drafts that know what is in them.

The target's rotation counts an image's rows and columns (M-RoPE), so its positions fall behind the number of tokens;
the drafter counts tokens. Drafts show whether its inputs are right: a bad draft changes no token.

Targets are tiny and random. The processor is built here, so that a server needs nothing from the hub: the tiny pairs'
tokenizer with Qwen's vision tokens, and Qwen's image processor.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.train.drafter import Drafter
from sglang_dflash_lab.train.reference_decoder import DrafterRun
from tests.support.checkpoints import COMMON, EXPERTS, GDN, MROPE, spread_weights, write_drafter
from tests.support.generation import assert_nothing_leaked, flush
from tests.support.servers import (
    RANDOM_WIDTHS,
    RETRACTED,
    TRACKED,
    Server,
    recorded_blocks,
    running,
    with_plugin,
    worker_info,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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
_DEEPSTACK: dict[str, Any] = {"deepstack_visual_indexes": [0, 1]}
_THREE: dict[str, Any] = {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
# Name -> transformers' stem, the text model's keys, the vision tower's. Qwen3-VL's tower also feeds two layers of the
# text model (deepstack).
_SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", {**GDN, **MROPE}, _NO_DEEPSTACK),
    "qwen3_5_moe": ("Qwen3_5Moe", {**GDN, **MROPE, **EXPERTS}, _NO_DEEPSTACK),
    "qwen3_vl": ("Qwen3VL", {"rope_parameters": _ROPE}, _DEEPSTACK),
    "qwen3_vl_moe": ("Qwen3VLMoe", {"rope_parameters": _ROPE, **EXPERTS}, _THREE),
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
    if name == "qwen3_vl_moe":  # published experts are [E, in, out]
        tensors = load_file(file := folder / "model.safetensors")
        of_experts = {key: each.mT.contiguous() for key, each in tensors.items() if ".experts." in key}
        save_file(tensors | of_experts, file, metadata={"format": "pt"})
    processor().save_pretrained(folder)
    return model


def processor() -> transformers.ProcessorMixin:
    """Build a processor for images of one token or more, whose sides it rounds to whole tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path("tiny-hybrid"))
    tokenizer.add_special_tokens({"additional_special_tokens": [text for text, _ in VISION_TOKENS.values()]})
    area = {"shortest_edge": TOKEN_PIXELS**2, "longest_edge": 256 * TOKEN_PIXELS**2}
    image = transformers.Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, size=area)
    video = transformers.Qwen3VLVideoProcessor(patch_size=PATCH, merge_size=MERGE)
    return transformers.Qwen3VLProcessor(image, tokenizer, video)


def drafter_for_images(folder: Path) -> Drafter:
    shared = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    same = {key: _TEXT[key] for key in (*shared, "vocab_size", "max_position_embeddings", "eos_token_id")}
    layers = {"target_layer_ids": (0, 2), "num_target_layers": _TEXT["num_hidden_layers"]}
    return write_drafter(folder, **same, **layers, block_size=BLOCK, mask_token_id=MASK)


def picture(columns: int, rows: int, seed: int) -> Image.Image:
    """Return noise of ``columns`` by ``rows`` image tokens."""
    shape = (rows * TOKEN_PIXELS, columns * TOKEN_PIXELS, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


Prompt = Sequence[str | Image.Image]


def text_and_images(prompt: Prompt) -> tuple[str, list[Image.Image]]:
    text = "".join(part if isinstance(part, str) else PLACEHOLDER for part in prompt)
    return text, [part for part in prompt if not isinstance(part, str)]


def url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


NEW_TOKENS = 40
CHUNK, WINDOW = 64, 32
CAT, DOG = picture(4, 3, seed=1), picture(4, 3, seed=2)
TALL, LARGE = picture(2, 7, seed=3), picture(12, 11, seed=4)
PROMPTS: dict[str, Prompt] = {
    "text": ["Count from one to ten, then back, and say why the order matters to you."],
    "image": [CAT, "What is it?"],
    "other image": [DOG, "What is it?"],
    "between": ["Look at this picture: ", TALL, " Is it taller than it is wide?"],
    "two": ["First ", CAT, " and second ", TALL, ": which of them is the larger one?"],
    # More image tokens than a chunk has.
    "large": ["A large one ", LARGE, " with many tokens."],
    "long text": [DOG, "All that follows is text. " * 12],
}


class Pair:
    """A vision-language target and its drafter, on disk and in transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.processor = folder, processor()
        self.model, self.drafter = write_target(name, folder / "target"), drafter_for_images(folder / "drafter")
        self.text_model = self.model.model.language_model

    @contextlib.contextmanager
    def served(self, folder: Path, *flags: str, **environment: str) -> Iterator[Server]:
        """Under DFLASH; ``drafts.jsonl`` has the drafts before some of them are corrected by ``answers.json``."""
        command = (
            *("--model-path", str(self.folder / "target"), "--dtype", "float32", "--max-running-requests", "8"),
            *("--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", str(BLOCK)),
            *("--speculative-draft-model-path", str(self.folder / "drafter"), "--chunked-prefill-size", str(CHUNK)),
            *(TRACKED if hasattr(self.text_model.config, "linear_num_key_heads") else ()),
        )
        copies = ("history",) if set(RANDOM_WIDTHS) <= set(flags) else ()
        plugin = with_plugin(folder, "drafts", "oracle", *copies)
        with running(folder, *command, *flags, **plugin, **environment) as server:
            assert worker_info(server)["block_size"] == BLOCK
            yield server
            assert_nothing_leaked(server)


class Reading:
    """A prompt and its answer read by transformers in one pass: greedy tokens, and what the drafter reads of each.

    The target's own code finds the M-RoPE positions.
    """

    def __init__(self, pair: Pair, name: str, answer: Sequence[int] = ()) -> None:
        text, images = text_and_images(PROMPTS[name])
        inputs = pair.processor(text=[text], images=images or None, return_tensors="pt")
        ids = torch.cat((inputs["input_ids"], torch.tensor([list(answer)], dtype=torch.long)), dim=1)
        self.tokens: list[int] = ids[0].tolist()
        is_image = ids == IMAGE_TOKEN
        self.images: list[int] = is_image[0].nonzero().flatten().tolist()
        pixels = {key: inputs[key] for key in ("pixel_values", "image_grid_thw") if key in inputs}
        taps: list[Tensor] = []
        hooks = [
            # What enters the next layer, deepstack's part included.
            pair.text_model.layers[i + 1].register_forward_pre_hook(
                lambda _, args, kwargs: taps.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
            for i in pair.drafter.config.target_layer_ids
        ]
        with torch.inference_mode():
            logits = pair.model(input_ids=ids, mm_token_type_ids=is_image.int(), **pixels).logits
        for hook in hooks:
            hook.remove()
        self.greedy: list[int] = logits[0, -len(answer) - 1 : -1].argmax(-1).tolist()
        self.features = torch.cat(taps, dim=-1)

    def drafts(self, pair: Pair, position: int, width: int, window: int | None) -> list[set[int]]:
        """Return the drafter's proposals after the token at ``position``: the likeliest tokens, two where they tie."""
        target = SimpleNamespace(model=pair.text_model, lm_head=pair.model.lm_head, device=pair.model.device)
        run = DrafterRun(pair.drafter, target, window)
        with torch.inference_mode():
            run.context = pair.drafter.context_key_values(self.features[:, :position], torch.arange(position)[None])
            run.length = position
            logits = target.lm_head(run.block_hidden(self.tokens[position], width)[1:])
        return [set((row > row.max() - ROUNDING).nonzero().flatten().tolist()) for row in logits]


def ask(server: Server, names: Sequence[str], attempt: str) -> dict[str, dict[str, Any]]:
    """The prompts of these names in one request."""
    prompts = [text_and_images(PROMPTS[name]) for name in names]
    body: dict[str, Any] = {
        "rid": [f"{name}/{attempt}" for name in names],
        "text": [text for text, _ in prompts],
        "image_data": [[url(image) for image in images] for _, images in prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return dict(zip(names, response.json(), strict=True))


def tokens(answers: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    return {name: answer["output_ids"] for name, answer in answers.items()}


def assert_answers(pair: Pair, server: Server) -> dict[str, int]:
    """All at once, without and with accepted drafts, then each alone; how much of each the cache had."""
    answers = tokens(ask(server, [*PROMPTS], "uncorrected"))
    for name, answer in answers.items():
        assert Reading(pair, name, answer).greedy == answer, name
    assert answers["image"] != answers["other image"], "the image does not matter"
    (server.folder / "answers.json").write_text(json.dumps(answers))
    flush(server)
    together = ask(server, [*PROMPTS], "together")
    assert tokens(together) == answers
    again = {name: ask(server, [name], "again")[name] for name in PROMPTS}
    assert tokens(again) == answers
    blocks = [answer["meta_info"]["spec_verify_ct"] for answer in together.values()]
    assert 1.5 * sum(blocks) < NEW_TOKENS * len(blocks), "hardly any draft was accepted"
    return {name: answer["meta_info"]["cached_tokens"] for name, answer in again.items()}


def assert_drafts(pair: Pair, server: Server, window: int | None = None) -> None:
    """Every block's drafts, without and with a prefix hit."""
    names = [name for name in PROMPTS if name != "text"]
    flush(server)
    answers = {(name, attempt): a for attempt in ("fresh", "cached") for name, a in ask(server, names, attempt).items()}
    for (name, attempt), answer in answers.items():
        reading = Reading(pair, name, answer["output_ids"])
        assert reading.greedy == answer["output_ids"], name
        # A step that was launched before the request's end was known has a block after it.
        found = recorded_blocks(server.folder, f"{name}/{attempt}")
        blocks = {at: block for at, block in found if at < len(reading.tokens)}
        assert len(blocks) > 1
        for at, block in blocks.items():
            drafts = reading.drafts(pair, at, len(block), window)
            assert block[0] == reading.tokens[at]
            pairs = zip(block[1:], drafts, strict=True)
            assert all(draft in likeliest for draft, likeliest in pairs), (name, attempt, at, block, drafts)


OTHERWISE: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "Qwen3.5": ("qwen3_5", (), {}),
    "Qwen3-VL, deepstack": ("qwen3_vl", (), {}),
    "Qwen3-VL, pages of 16": ("qwen3_vl", ("--page-size", "16"), {}),
    "Qwen3-VL of experts": ("qwen3_vl_moe", (), {}),
    "Qwen3.5 of experts": ("qwen3_5_moe", (), {}),
    "draft window": ("qwen3_5", ("--speculative-draft-window-size", str(WINDOW)), {}),
    "widths at random, copies": ("qwen3_5", RANDOM_WIDTHS, {}),
    "mixed batches": ("qwen3_5", ("--enable-mixed-chunk", "--max-running-requests", "3"), {}),
    "no overlap": ("qwen3_5", ("--disable-overlap-schedule",), {}),
    "retraction": ("qwen3_5", (), RETRACTED),
    "two ranks": ("qwen3_5", ("--tp-size", "2"), {}),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", OTHERWISE)
def test_answers_are_the_targets_and_drafts_the_references(case: str, tmp_path: Path) -> None:
    name, flags, environment = OTHERWISE[case]
    pair = Pair(name, tmp_path)
    with pair.served(tmp_path, *flags, **environment) as server:
        cached = assert_answers(pair, server)
        assert_drafts(pair, server, WINDOW if case == "draft window" else None)
        if case == "Qwen3.5":
            assert cached["long text"] > Reading(pair, "long text").images[-1] + 1, "no hit ends after an image"
            flush(server)  # alone: among others, the ends of its chunks depend on when they arrive
            alone, hit = (ask(server, ["large"], attempt)["large"] for attempt in ("alone", "hit"))
            assert alone["output_ids"] == hit["output_ids"]
            first, *_, last = Reading(pair, "large").images
            assert first < hit["meta_info"]["cached_tokens"] <= last, "none inside one"
