"""The installed SGLang has every name that we use, and another one is refused in one message."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import sglang.srt

from sglang_dflash import upstream
from sglang_dflash.errors import DFlashError
from sglang_dflash.worker.worker import DFlashWorker
from tests.house.contract import SYMBOLS

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("path", sorted(SYMBOLS))
def test_a_symbol_exists_with_the_parameters_that_we_pass(path: str) -> None:
    assert SYMBOLS[path].problem() is None


def test_the_installed_version_is_supported_without_a_note() -> None:
    assert upstream.check_version() is None


@pytest.mark.parametrize("build", [".post1", ".dev3", "rc1", "+cu129", ".post2.dev7+gabc1234", "a1"])
def test_a_build_of_a_tested_release_is_accepted_with_a_note(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = upstream.TESTED_SGLANG
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: tested + build)
    assert upstream.check_version() == (
        f"treating SGLang {tested}{build} as {tested}, the release that this package is tested with"
    )


@pytest.mark.parametrize(
    "found", [None, "", "0.5.22.post1", "0.5.24.dev3", "0.5.24rc1", "0.5.230", "0.5.23.1", "1!0.5.23", "unknown"]
)
def test_a_build_of_another_release_is_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: found)
    with pytest.raises(DFlashError, match=found.replace("+", ".") if found else "not installed"):
        upstream.check_version()


def test_errors_keep_their_parts_between_processes() -> None:
    error = DFlashError("block_size 64", remedy="pass a smaller one")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is DFlashError
    assert (copy.problem, copy.remedy) == ("block_size 64", "pass a smaller one")
    assert str(copy) == str(error)


# --- what SGLang reads of a worker

SRT = Path(sglang.srt.__path__[0])
# In these folders a worker of this name is a drafter's or another algorithm's.
OTHERS = ("speculative", "hardware_backend")
# By a dot (of ``draft_worker.model_worker.x`` both), or by ``getattr``.
READ = re.compile(
    r"(?:draft_worker|model_worker)(?=\.([a-z_]\w*))|(?:get|has)attr\(\s*[\w.]*(?:draft_worker|model_worker),\s*\"(\w+)\""
)
# Read under DSPARK alone, or with a default where a worker lacks the attribute.
NOT_OURS = {
    "get_confidence_budget_prepare",
    "dump_info_records",
    "clear_info_records",
    "set_dspark_forced_budget_frac",
    "block_accept_estimate_log_suffix",
    "prepare_for_kv_cache_release",
}


def test_the_class_defines_what_sglang_reads_of_a_worker() -> None:
    paths = (path for path in SRT.rglob("*.py") if path.relative_to(SRT).parts[0] not in OTHERS)
    found = {
        name for path in paths for match in READ.findall(path.read_text(encoding="utf-8")) for name in match if name
    }
    assert {"forward_batch_generation", "spec_v2_attn_backends", "model_runner"} <= found
    assert {name for name in found if not hasattr(DFlashWorker, name)} == NOT_OURS
