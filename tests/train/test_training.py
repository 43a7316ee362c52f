"""The trainers' parts: the optimizer, resuming, rows that equal the chat template, batched generation."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from sglang_dflash.pairs import drafter_path, target_path
from sglang_dflash.pairs.corpus import prompts
from sglang_dflash.train.cli import app
from sglang_dflash.train.drafter import Drafter
from sglang_dflash.train.generate import greedy_answers
from sglang_dflash.train.hf import transformers
from sglang_dflash.train.loop import train
from sglang_dflash.train.measure import prompt_ids
from sglang_dflash.train.optim import Muon, Optimizers, _orthogonalise
from sglang_dflash.train.reference_decoder import TargetRun
from sglang_dflash.train.rows import EVEN, ConversationEncoder, pack, training_conversation, training_rows
from sglang_dflash.train.target_training import STAGES, Stage, train_target
from sglang_dflash.train.tokenizer import SPECIAL_TOKENS, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(target_path("tiny-hybrid"))


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16), (3, 16, 40)])
def test_muon_updates_are_nearly_orthogonal_and_keep_the_direction(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(shape)
    update = _orthogonalise(gradient).float()
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert ((gradient * update).sum((-2, -1)) > 0).all()


def test_matrices_go_to_muon_and_the_rest_to_adam() -> None:
    model = nn.ModuleDict(
        {"embed_tokens": nn.Embedding(8, 4), "proj": nn.Linear(4, 4), "conv1d": nn.Conv1d(4, 4, 2, groups=4)}
    )
    (muon, _), (adam, _) = Optimizers(model, steps=10)._all
    assert isinstance(muon, Muon)
    assert [p.shape for p in muon.param_groups[0]["params"]] == [(4, 4)]
    assert len(adam.param_groups[0]["params"]) == 4


def test_a_resumed_training_ends_where_an_unbroken_one_ends(tmp_path: Path) -> None:
    def run(folder: Path, stop_at: int | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))

        def loss_of_step(i: int) -> Tensor:
            if i == stop_at:
                raise KeyboardInterrupt
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i))
            return (model(x) - x[:, :2]).square().mean()

        train(model, loss_of_step, lambda: 0.0, steps=230, folder=folder)
        return model[0].weight

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", stop_at=150)
    assert torch.equal(run(tmp_path / "broken", None), run(tmp_path / "unbroken", None))


def test_a_stage_trains_at_its_own_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage's rate is zero: the first one's matrices stay. Embeddings have Adam's rate and move on."""
    stages = (Stage(1, 2048, EVEN, lr=1.0), Stage(1, 2048, EVEN, lr=0.0))
    monkeypatch.setitem(STAGES, "tiny-dense", stages)
    train_target("tiny-dense", target_path("tiny-dense"), tmp_path / "run", tmp_path / "out", 0, "cpu")
    first, second = (
        torch.load(tmp_path / "run" / f"stage-{number}" / "checkpoint.pt", weights_only=True)["model"]
        for number in (1, 2)
    )
    matrices = [name for name in first if name.endswith("proj.weight")]
    assert matrices
    assert all(torch.equal(first[name], second[name]) for name in matrices)
    assert not torch.equal(first["model.embed_tokens.weight"], second["model.embed_tokens.weight"])


def test_a_drafter_starts_from_the_given_one(tmp_path: Path) -> None:
    """After one step of the warm-up it is still close to where it started."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(f"{json.dumps(p.messages)}\n" for p in prompts("json", "train", n=12, shape="single")))
    given = drafter_path("tiny-dense", "good")
    command = ["train-drafter", str(target_path("tiny-dense")), "--chats", str(chats), "--steps", "1"]
    farthest = {}
    for name, start in (("started", ("--start", str(given))), ("afresh", ())):
        result = CliRunner().invoke(
            app, [*command, "--work", str(tmp_path / name), "--out", str(tmp_path / name / "drafter"), *start]
        )
        assert result.exit_code == 0, result.output
        before, after = Drafter.load(given).state_dict(), Drafter.load(tmp_path / name / "drafter").state_dict()
        assert before.keys() == after.keys()
        farthest[name] = max((after[key] - before[key]).abs().max().item() for key in before)
    assert farthest["started"] < 0.01 < farthest["afresh"]


def test_encoded_conversations_equal_the_chat_template(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    encoder, rng = ConversationEncoder(tokenizer), Random(0)
    kinds = set()
    for _ in range(150):
        conversation = training_conversation(rng, 2048)
        text = tokenizer.apply_chat_template(
            conversation.messages(),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=conversation.thinking,
        )
        last = conversation.turns[-1]
        text += (f"{last.thought}\n</think>\n\n" if conversation.thinking else "") + last.answer + "<|im_end|>"
        ids, weights = encoder.encode(conversation)
        assert ids == tokenizer(text)["input_ids"] and len(weights) == len(ids)
        kinds.add((conversation.thinking, bool(conversation.system), len(conversation.turns) > 1))
    assert len(kinds) >= 6


def test_weights_are_full_on_answers_only(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    encoder, rng = ConversationEncoder(tokenizer), Random(1)
    conversation = training_conversation(rng, 256)
    while conversation.thinking or len(conversation.turns) > 1:
        conversation = training_conversation(rng, 256)
    ids, weights = encoder.encode(conversation)
    answer = [i for i, weight in zip(ids, weights, strict=True) if weight == 1.0]
    assert tokenizer.decode(answer) == conversation.turns[0].answer + "<|im_end|>"


def test_packing_keeps_every_fitting_item_whole() -> None:
    items = [([k] * k, [1.0] * k) for k in (5, 9, 3, 12, 7, 2)]
    ids, weights = pack(items, 10, pad=0)
    found = sorted(x for x in ids.flatten().tolist() if x)
    assert found == sorted(k for k in (5, 9, 3, 7, 2) for _ in range(k))
    assert ((weights == 0) == ((ids == 0) | (torch.arange(10) == 0))).all()


def test_training_rows_have_the_asked_shape_and_little_padding(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> None:
    encoder = ConversationEncoder(tokenizer)
    for rows, length in ((8, 256), (2, 2048)):
        ids, weights = training_rows(encoder, Random(0), rows, length)
        assert ids.shape == weights.shape == (rows, length)
        assert (ids == encoder.pad).float().mean() < 0.2


def test_the_thinking_switch_and_the_forgotten_thoughts(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
        {"role": "user", "content": "Bye"},
    ]

    def render(**switch: bool) -> str:
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **switch)

    before = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert render(enable_thinking=True) == before + "<|im_start|>assistant\n<think>\n"
    assert render() == render(enable_thinking=False) == before + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_tokenizer_specials_round_trip_and_reproduction(
    tokenizer: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(len(SPECIAL_TOKENS)))
    assert len(tokenizer) == 1024 and tokenizer.mask_token_id == 3 and tokenizer.eos_token_id == 2
    text = "Grüße, 23 äpfel!\n\tdef f(x): return x ** 2  # 日本"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert 3 not in tokenizer("mask <mask> [MASK]")["input_ids"]
    again = train_tokenizer(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_prompts_are_20_to_1500_tokens_long(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    lengths = [len(prompt_ids(tokenizer, p)) for task in ("math", "code", "json", "chat") for p in prompts(task, n=150)]
    assert min(lengths) >= 20 and max(lengths) <= 1500
    assert min(lengths) < 50 and max(lengths) > 1000


def test_batched_answers_equal_one_by_one_decoding(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """Left padding and leaving rows change nothing, recurrent layers included."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target_path("tiny-hybrid"), dtype=torch.float32).eval()
    asked = [prompt_ids(tokenizer, p) for task in ("json", "chat") for p in prompts(task, n=3)]
    for prompt, answer in zip(asked, greedy_answers(model, asked, 40, batch_size=4), strict=True):
        run, alone = TargetRun(model), []
        token = int(run.append(prompt)[0][-1].argmax())
        while len(alone) < 40:
            alone.append(token)
            if token == model.config.eos_token_id:
                break
            token = int(run.append([token])[0][-1].argmax())
        assert answer == alone
