"""In a real server a drafter in another trainer's or tool's form drafts what its plain form drafts."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.configs import write_model
from tests.support.files import load_config, load_drafter
from tests.support.generation import Answer, counted, generate_all
from tests.support.prompts import corpus
from tests.support.servers import (
    dflash_server,
    draft_arguments,
    running,
    target_arguments,
    with_plugin,
    worker_info,
)

PAIR, PROMPTS, NEW_TOKENS = "tiny-dense", 4, 48

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def as_speculators(folder: Path, not_drafted: set[int]) -> None:
    """With copies of the target's vocabulary, which is reduced by the tokens that are not to be drafted."""
    target, config = load_file(target_path(PAIR) / "model.safetensors"), load_config(drafter_path(PAIR))
    ids = torch.tensor([i for i in range(config["vocab_size"]) if i not in not_drafted])
    embedding = target["model.embed_tokens.weight"]
    tensors = {
        **load_file(drafter_path(PAIR) / "model.safetensors"),
        "embed_tokens.weight": embedding,
        "lm_head.weight": target.get("lm_head.weight", embedding)[ids].contiguous(),
        "t2d": torch.zeros(len(embedding), dtype=torch.bool).index_fill_(0, ids, True),
        "d2t": ids - torch.arange(len(ids)),
    }
    dflash = config.pop("dflash_config")
    del config["architectures"], config["num_target_layers"], config["torch_dtype"]
    written = {
        **{"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "draft_vocab_size": len(ids)},
        **{key: config.pop(key) for key in ("block_size", "dtype")},
        **{"sample_from_anchor": False, "sliding_window_non_causal": False, "mask_token_id": dflash["mask_token_id"]},
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "transformer_layer_config": config,
    }
    write_model(folder, written, tensors)


def answers_with(drafter: Path, tmp_path: Path) -> list[Answer]:
    command = (*target_arguments(PAIR), *draft_arguments(PAIR, drafter))
    with running(tmp_path, *command, XDG_CACHE_HOME=str(tmp_path / "cache")) as server:
        assert worker_info(server)["drafter"].startswith(str(tmp_path / "cache"))
        return generate_all(server, corpus(PAIR, PROMPTS), 1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    with dflash_server(PAIR, tmp_path_factory.mktemp("plain")) as server:
        return generate_all(server, corpus(PAIR, PROMPTS), 1)


def test_drafts_as_in_the_plain_form(plain: list[Answer], tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    answered = {token for answer in plain for token in answer.tokens}
    unused = max({*range(load_config(drafter_path(PAIR))["vocab_size"])} - answered)
    as_speculators(folder, {unused})
    assert counted(answers_with(folder, tmp_path)) == counted(plain)
    assert all(answer.meta["spec_accept_length"] > 2 for answer in plain)


def test_an_override_of_the_target_leaves_the_drafter_its_own(plain: list[Answer], tmp_path: Path) -> None:
    """Their layers differ."""
    stated = load_config(target_path(PAIR))
    same = {key: stated[key] for key in ("num_hidden_layers", "intermediate_size", "rms_norm_eps")}
    override = ("--json-model-override-args", json.dumps(same))
    command = (*target_arguments(PAIR), *draft_arguments(PAIR), *override)
    with running(tmp_path, *command, **with_plugin(tmp_path, "memory")) as server:
        assert counted(generate_all(server, corpus(PAIR, PROMPTS), 1)) == counted(plain)
        pools = worker_info(server)["memory_bytes"]
    # Both models' K/V have the same slots: bytes differ by layers and heads.
    configs = [load_config(folder(PAIR)) for folder in (drafter_path, target_path)]
    numbers = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    sizes = [math.prod(each[number] for number in numbers) for each in configs]
    assert pools["draft_kv"] * sizes[1] == pools["target_kv"] * sizes[0]


def test_a_token_outside_its_vocabulary_is_never_drafted(plain: list[Answer], tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    as_speculators(folder, {token for answer in plain for token in answer.tokens})
    answers = answers_with(folder, tmp_path)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    # The prefill yields the first token, and every step after it only the target's.
    assert [answer.meta["spec_verify_ct"] for answer in answers] == [len(answer.tokens) - 1 for answer in plain]


def test_another_mask_embedding_changes_drafts_and_no_output(plain: list[Answer], tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(drafter_path(PAIR), drafter)
    published = load_drafter(drafter)
    noise = 100 * torch.randn(published.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.save({"embedding": noise, "mask_token_id": published.mask_token_id}, drafter / "mask_embedding.pt")
    with running(tmp_path, *target_arguments(PAIR), *draft_arguments(PAIR, drafter)) as server:
        answers = generate_all(server, corpus(PAIR, PROMPTS), 1)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    length, spoilt = (sum(each.meta["spec_accept_length"] for each in every) for every in (plain, answers))
    assert spoilt < length / 2
