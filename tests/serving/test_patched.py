"""A patched copy of SGLang with plugins switched off serves DFLASH with this package's worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.hooks.reports import SERVER_INFO_KEY
from tests.support.cards import card
from tests.support.checkpoints import assert_greedy
from tests.support.patched import apply, copy_of_sglang, without_plugins
from tests.support.servers import running
from tests.support.shrunk_cards import FLOAT32, RICHEST, build, generate, prompts

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_the_patched_tree_serves_a_card(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    tree = copy_of_sglang(tmp_path / "tree")
    assert apply(str(tree)).returncode == 0
    target = build(RICHEST, tmp_path)
    arguments = [*card(RICHEST).arguments_for(tmp_path / "target", tmp_path / "drafter"), *FLOAT32]
    with running(tmp_path, *arguments, **without_plugins(tree)) as server:
        answers = generate(server)
        state = server.get("/server_info").json()["internal_states"][0]
        log = server.log
    assert SERVER_INFO_KEY in state
    assert "Executed general plugin" not in log
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert_greedy(target, prompt, answer["output_ids"])
