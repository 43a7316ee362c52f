"""Every attribute that SGLang reads of a worker is defined by our class or by its base."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import sglang.srt

from sglang_dflash.worker.worker import DFlashWorker

pytestmark = pytest.mark.sglang

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
