"""An SGLang plugin for tests: writes down what the worker does, from inside the server.

A server finds it when ``tests/engine/probe`` is on PYTHONPATH; it writes to the folder DFLASH_PROBE, and leaves out the
recurrent states (a file per request and step) where DFLASH_PROBE_STATES is 0.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(os.environ.get("DFLASH_PROBE", "."))
WORKER = "sglang_dflash.worker.worker.DFlashWorker."


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_dflash.worker.draft.Drafting.__call__", record_drafts, HookType.AFTER)
    HookRegistry.register("sglang_dflash.worker.recurrent.commit", record_committed_state, HookType.AFTER)
    HookRegistry.register(WORKER + "_prefill", record_prefilled_state, HookType.AFTER)
    HookRegistry.register(WORKER + "_prefill", record_mixed, HookType.AFTER)


def record_drafts(tokens: torch.Tensor, _: Any, batch: Any, step: Any) -> None:
    """One line per request and step: the block's first position and its tokens, anchor first."""
    with (FOLDER / "drafts.jsonl").open("a") as file:
        for req, start, block in zip(batch.reqs, batch.seq_lens.tolist(), tokens.tolist(), strict=True):
            file.write(json.dumps({"rid": req.rid, "position": start, "block": block}) + "\n")


def record_mixed(result: Any, worker: Any, batch: Any, *_: Any) -> None:
    """One line per request that decodes beside a prefill: how many of its tokens the scheduler has not yet seen."""
    decoding = {id(req) for req in batch.decoding_reqs or ()}
    with (FOLDER / "mixed.jsonl").open("a") as file:
        for req, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            if id(req) in decoding:
                unseen = length - len(req.origin_input_ids) - len(req.output_ids)
                file.write(json.dumps({"rid": req.rid, "unseen": unseen}) + "\n")


def record_committed_state(_: None, batch: Any, step: Any, accepted: Any, committed: Any, target_worker: Any) -> None:
    record_states(batch, accepted.new_seq_lens.tolist(), target_worker)


def record_prefilled_state(result: Any, worker: Any, batch: Any, *_: Any) -> None:
    record_states(batch, batch.seq_lens.tolist(), worker.target_worker)


def record_states(batch: Any, lengths: list[int], target_worker: Any) -> None:
    """Recurrent state of every request after ``length`` tokens: ``state-<rid>-<length>.pt``."""
    pool = target_worker.model_runner.req_to_token_pool
    if not hasattr(pool, "mamba_pool") or os.environ.get("DFLASH_PROBE_STATES") == "0":
        return
    cache, slots = pool.mamba_pool.mamba_cache, pool.get_mamba_indices(batch.req_pool_indices).tolist()
    for req, length, slot in zip(batch.reqs, lengths, slots, strict=True):
        state = {"temporal": cache.temporal[:, slot].clone(), "conv": [c[:, slot].clone() for c in cache.conv]}
        torch.save(state, FOLDER / f"state-{req.rid}-{length}.pt")
