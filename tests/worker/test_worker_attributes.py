"""Every attribute that SGLang reads of a worker is defined by our class or by its base."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import sglang.srt

from sglang_dflash.worker.worker import DFlashWorker

pytestmark = pytest.mark.sglang

SRT = Path(sglang.srt.__path__[0])
# In these folders a worker of this name is a drafter's or another algorithm's.
OTHERS = ("speculative", "hardware_backend")
NAMES = ("draft_worker", "model_worker")
# Read under DSPARK alone, or with a default where a worker lacks the attribute.
NOT_OURS = {
    "get_confidence_budget_prepare",
    "dump_info_records",
    "clear_info_records",
    "set_dspark_forced_budget_frac",
    "block_accept_estimate_log_suffix",
    "prepare_for_kv_cache_release",
}


def reads(tree: ast.AST) -> Iterator[str]:
    """Attributes read of a variable or an attribute whose name is in ``NAMES``, by a dot or by ``getattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_worker(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            worker, name = node.args[:2]
            if _is_worker(worker) and isinstance(name, ast.Constant):
                yield str(name.value)


def _is_worker(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
    return name in NAMES


def test_the_class_defines_what_sglang_reads_of_a_worker() -> None:
    found = set[str]()
    for path in sorted(SRT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.relative_to(SRT).parts[0] not in OTHERS and any(name in text for name in NAMES):
            found |= set(reads(ast.parse(text)))
    assert {"forward_batch_generation", "spec_v2_attn_backends", "model_runner"} <= found
    assert {name for name in found if not hasattr(DFlashWorker, name)} == NOT_OURS


def test_a_missing_attribute_is_an_error_of_this_class() -> None:
    worker = object.__new__(DFlashWorker)
    with pytest.raises(AttributeError, match="'DFlashWorker' object has no attribute 'rings'"):
        worker.rings  # noqa: B018
