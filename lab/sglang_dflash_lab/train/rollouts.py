"""An online trainer's loop: roll out, train the drafter on the returned states, update the server.

``python -m sglang_dflash_lab.train.rollouts PAIR`` prints a line per round. Every third round also changes the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import httpx
import torch
import typer
from sglang.srt.utils import MultiprocessingSerializer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sglang_dflash_lab.bench.server import Launch, running
from sglang_dflash_lab.pairs import NOISY, drafter_path, target_path
from sglang_dflash_lab.pairs.corpus import TASKS, prompts
from sglang_dflash_lab.train.drafter import Drafter
from sglang_dflash_lab.train.drafter_training import block_loss, block_outputs, cut_blocks
from sglang_dflash_lab.train.hf import load_model, load_tokenizer
from sglang_dflash_lab.train.loop import WARMUP_STEPS, Optimizers
from sglang_dflash_lab.train.measure import prompt_ids

# Cached prefixes have no states, so nothing is cached. In exact mode seeded text equals plain decoding's.
SERVER = (
    *("--dtype", "bfloat16", "--skip-tokenizer-init", "--disable-radix-cache", "--max-running-requests", "16"),
    *("--return-hidden-states-mode", "full", "--enable-deterministic-inference"),
)
NEW_TOKENS, ANCHORS = 48, 24
NOISE = 0.1  # of a change of the target, in standard deviations


class Rollouts(NamedTuple):
    """Answers: new tokens, log-probabilities, states [tokens, K * H], tokens per verify step."""

    tokens: list[list[int]]
    log_probabilities: list[list[float]]
    states: list[Tensor]
    accept_length: float | None


class Loop:
    """Target, drafter and optimiser of a trainer, and the servers that it updates; the first one drafts."""

    def __init__(self, pair: str, urls: Sequence[str], steps: int = 1) -> None:
        self._urls, self._steps, self._taken = urls, steps, 0
        self._target = load_model(target_path(pair)).requires_grad_(False)
        self._drafter = Drafter.load(drafter_path(pair, NOISY))
        self._optimizers = Optimizers(self._drafter, 10**6, lr=0.005, adam_lr=5e-4)
        tokenizer = load_tokenizer(target_path(pair))
        asked = (prompt for task in TASKS for prompt in prompts(task, "train", 4, shape="single"))
        self._prompts = [prompt_ids(tokenizer, prompt) for prompt in asked]

    def roll_out(self, seed: int, url: str | None = None) -> Rollouts:
        """Send every prompt with its own seed; without speculation, states are the last layer's."""
        params = [
            {"temperature": 0.7, "sampling_seed": 1000 * seed + i, "max_new_tokens": NEW_TOKENS}
            | {"custom_params": {"hidden_states": "target_layers"}}
            for i in range(len(self._prompts))
        ]
        body = {"input_ids": self._prompts, "sampling_params": params}
        answers = _post(url or self._urls[0], "generate", **body, return_logprob=True, return_hidden_states=True)
        metas: list[dict[str, Any]] = [answer["meta_info"] for answer in answers]
        steps = sum(meta.get("spec_verify_ct", 0) for meta in metas)
        return Rollouts(
            [answer["output_ids"] for answer in answers],
            [[value for value, *_ in meta["output_token_logprobs"]] for meta in metas],
            [torch.tensor([*meta["hidden_states"][0], *meta["hidden_states"][1:]]) for meta in metas],
            sum(meta["completion_tokens"] for meta in metas) / steps if steps else None,
        )

    def train(self, found: Rollouts) -> float:
        """Train the drafter on rollouts, whose states are its input; return the last loss."""
        texts = list(zip(self._prompts, found.tokens, strict=True))
        ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in texts], batch_first=True)
        weights = [torch.tensor([0.0] * len(prompt) + [1.0] * len(answer)) for prompt, answer in texts]
        # The last token was never an input, so it has no states.
        features = pad_sequence([nn.functional.pad(each, (0, 0, 0, 1)) for each in found.states], batch_first=True)
        loss = torch.zeros(())
        for _ in range(self._steps):
            generator = torch.Generator().manual_seed(self._taken)
            blocks = cut_blocks(ids, pad_sequence(weights, batch_first=True), ANCHORS, generator)
            loss = block_loss(self._drafter, *block_outputs(self._drafter, self._target, ids, blocks, features), blocks)
            loss.backward()
            nn.utils.clip_grad_norm_(self._drafter.parameters(), 1.0)
            self._optimizers.step(WARMUP_STEPS + self._taken)
            self._taken += 1
        return loss.item()

    def move_target(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self._target.state_dict().values():
            if tensor.dim() == 2:
                tensor += NOISE * tensor.std() * torch.randn(tensor.shape, generator=generator)

    def update(self, model: str, version: str) -> None:
        """Send the weights of ``"target"`` or ``"draft"``."""
        torch.multiprocessing.set_sharing_strategy("file_system")  # shared memory by name
        module, urls = (self._target, self._urls) if model == "target" else (self._drafter, self._urls[:1])
        tensors = [(name, tensor.detach().bfloat16()) for name, tensor in module.state_dict().items()]
        for url in urls:
            sent = MultiprocessingSerializer.serialize(tensors, output_str=True)
            _post(url, "begin_weight_update", selector=model)
            _post(url, "update_weights_from_tensor", serialized_named_tensors=[sent], selector=model,
                  weight_version=version)  # fmt: skip
            _post(url, "end_weight_update")


def _post(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}/{path}", json=body, timeout=600)
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"{path}: {answer.text}")
    return answer.json()


def main(
    pair: str, rounds: int = 6, steps: Annotated[int, typer.Option(help="Optimiser steps per round.")] = 1
) -> None:
    """Serve a tiny pair, train its noisy drafter online, and print a line per round."""
    drafts = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(drafter_path(pair, NOISY)))
    launch = Launch(("--model-path", str(target_path(pair)), *drafts, *SERVER))
    with TemporaryDirectory() as folder, running(launch, Path(folder, "log")) as url:
        loop = Loop(pair, [url], steps)
        for number in range(1, rounds + 1):
            found = loop.roll_out(number)
            loss, moves = loop.train(found), number % 3 == 0
            if moves:
                loop.move_target(number)
                loop.update("target", f"round-{number}")
            loop.update("draft", f"round-{number}")
            mean = sum(map(sum, found.log_probabilities)) / sum(map(len, found.log_probabilities))
            typer.echo(
                f"round {number}: accept length {found.accept_length:.2f}, log-probability {mean:.2f}, loss {loss:.2f}"
                f"{', then the target moved' if moves else ''}"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads slow these small models down
    typer.run(main)
