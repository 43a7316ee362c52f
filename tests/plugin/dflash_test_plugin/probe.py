"""Records what the worker does, from inside the server, in the folder ``SGLANG_DFLASH_TEST_FOLDER``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(os.environ.get("SGLANG_DFLASH_TEST_FOLDER", "."))


def record_drafts(_: None, draft: Any, step: Any) -> None:
    """Mode ``drafts``, one line per request and step: the block's first position and its tokens, anchor first."""
    with (FOLDER / "drafts.jsonl").open("a") as file:
        for req, start, block in zip(step.batch.reqs, step.batch.seq_lens.tolist(), step.tokens.tolist(), strict=True):
            file.write(json.dumps({"rid": req.rid, "position": start, "block": block}) + "\n")


def record_mixed(result: Any, worker: Any, batch: Any, *_: Any) -> None:
    """Mode ``mixed``, one line per request that decodes beside a prefill: its tokens that the scheduler lacks."""
    decoding = {id(req) for req in batch.decoding_reqs or ()}
    with (FOLDER / "mixed.jsonl").open("a") as file:
        for req, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            if id(req) in decoding:
                unseen = length - len(req.origin_input_ids) - len(req.output_ids)
                file.write(json.dumps({"rid": req.rid, "unseen": unseen}) + "\n")


def record_committed_state(_: None, commit: Any, step: Any) -> None:
    """Mode ``states``, after each block."""
    record_states(step.batch, step.accepted.new_seq_lens.tolist(), commit._target)


def record_prefilled_state(result: Any, worker: Any, batch: Any, *_: Any) -> None:
    """Mode ``states``, after each prefill."""
    record_states(batch, batch.seq_lens.tolist(), worker.target_worker)


def record_states(batch: Any, lengths: list[int], target_worker: Any) -> None:
    """Recurrent state of every request after ``length`` tokens: ``state-<rid>-<length>.pt``."""
    pool = target_worker.model_runner.req_to_token_pool
    cache, slots = pool.mamba_pool.mamba_cache, pool.get_mamba_indices(batch.req_pool_indices).tolist()
    for req, length, slot in zip(batch.reqs, lengths, slots, strict=True):
        state = {"temporal": cache.temporal[:, slot].clone(), "conv": [c[:, slot].clone() for c in cache.conv]}
        torch.save(state, FOLDER / f"state-{req.rid}-{length}.pt")
