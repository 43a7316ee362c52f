"""Modes that record what the worker does, from inside the server, in the folder ``SGLANG_DFLASH_TEST_FOLDER``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(os.environ.get("SGLANG_DFLASH_TEST_FOLDER", "."))


def record_drafts(_: None, draft: Any, step: Any) -> None:
    """Mode ``drafts``, one line per request and step: the block's first position and its tokens, anchor first."""
    with (FOLDER / "drafts.jsonl").open("a") as file:
        for req, start, block in zip(step.batch.reqs, step.batch.seq_lens.tolist(), step.tokens.tolist(), strict=True):
            file.write(json.dumps({"rid": req.rid, "position": start, "block": block}) + "\n")


def record_candidates(_: Any, *, candidates: Any, prefix_lens: Any, **__: Any) -> None:
    """Mode ``sglangs_drafts``: as ``drafts``, without the request, in SGLang's own worker."""
    with (FOLDER / "drafts.jsonl").open("a") as file:
        for start, block in zip(prefix_lens.tolist(), candidates.tolist(), strict=True):
            file.write(json.dumps({"rid": None, "position": start, "block": block}) + "\n")


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


def record_round(record: Any, worker: Any, batch: Any) -> Any:
    """Mode ``rounds``, one line per rank and step: its width, and the rank's own requests."""
    from dflash_test_plugin.changes import rank

    with (FOLDER / f"rounds-{rank()}.jsonl").open("a") as file:
        file.write(json.dumps({"width": record.width, "requests": len(batch.reqs)}) + "\n")
    return record


def check_draft(model: Any, input_ids: Any, positions: Any, forward_batch: Any) -> None:
    """The same mode: the drafter runs on the ranks that share a batch, and no other rank's numbers reach it."""
    assert forward_batch.global_num_tokens_cpu is None


def check_verify(worker: Any, batch: Any = None, forward_batch: Any = None, is_verify: bool = False, **_: Any) -> None:
    """The same mode: SGLang pads the batch for the other ranks, so nothing is planned for it before."""
    if is_verify:
        assert not forward_batch.forward_metadata_ready and forward_batch.global_num_tokens_cpu is not None


_compared = 0


def compare(worker: Any, batch: Any, *_: Any) -> None:
    """Mode ``history``, before each decode step: the device's history of each request is what the host knows of it.

    A wrong history changes no text, only what is copied. With overlap the host's tokens lag by a step.
    """
    global _compared
    copies, most = worker._copies, worker.plan.block
    for row, req, length in zip(batch.req_pool_indices.tolist(), batch.reqs, batch.seq_lens.tolist(), strict=True):
        tokens = np.concatenate([np.array(ids, dtype=np.int64) for ids in (req.origin_input_ids, req.output_ids)])
        known = np.where((tokens >= 0) & (tokens < copies._vocabulary), tokens, -1)[: length + 1]
        wrong = np.flatnonzero(copies.history[row, : len(known)].numpy() != known)
        assert not len(wrong), f"history of {req.rid}, row {row}, {length} tokens: other tokens at {wrong[:9]}"
        assert req.finished() or length + 1 - len(known) <= most, f"{req.rid}: {length} tokens, {len(known)} known"
        _compared += 1
    (FOLDER / "histories.txt").write_text(str(_compared))


_sent = 0


def count_gathered(group: Any, tensor: Any, *_: Any, **__: Any) -> None:
    """Mode ``gathers``, before each gather between ranks."""
    global _sent
    _sent += tensor.nbytes


def record_gathered(original: Callable[..., Any], worker: Any, batch: Any, *others: Any) -> Any:
    """Mode ``gathers``, one line per decode step: whether it penalises, its rows, and the bytes that a rank sent."""
    global _sent
    _sent = 0
    result = original(worker, batch, *others)
    penalised = batch.sampling_info.acc_additive_penalties is not None
    with (FOLDER / "gathers.jsonl").open("a") as file:
        rows = batch.batch_size() * result.speculative_num_draft_tokens
        file.write(json.dumps({"penalised": penalised, "rows": rows, "sent": _sent}) + "\n")
    return result


def count_lost(result: Any, scheduler: Any, *_: Any) -> Any:
    """Mode ``pools``: add lost slots to ``/server_info``; of a server at rest all must be 0."""
    requests, kv, cache = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    stats = scheduler.pool_stats_observer.get_pool_stats()
    result.internal_state["pools"] = {
        "kv slots": kv.size - stats.full_available_size - stats.full_evictable_size,
        "states": requests.mamba_pool.size - stats.mamba_available_size - stats.mamba_evictable_size,
        # A row brings its ring of the drafter's K/V and its records of a block, which nothing hands out by themselves.
        "rows": requests.size - requests.available_size(),
        "locked in the prefix cache": cache.full_protected_size() + cache.mamba_protected_size(),
        "steps without counts": len(scheduler.draft_worker._in_flight),
    }
    return result


def chosen_width(*_: Any) -> int:
    """Mode ``acceptance``, after a random width was drawn: the one in the folder's file instead."""
    return int((FOLDER / "width").read_text())


def record_and_refuse(_: None, copies: Any, step: Any) -> None:
    """The same mode, after copies: one line per request, then spoil the drafts, so that every position has a step.

    A line has the block from the anchor at ``position`` on, and the length of the match that it could copy.
    """
    rows = copies.found[step.batch.req_pool_indices, 0].tolist()
    with (FOLDER / "acceptance.jsonl").open("a") as file:
        for req, start, block, key in zip(
            step.batch.reqs, step.batch.seq_lens.tolist(), step.tokens.tolist(), rows, strict=True
        ):
            line = {"rid": req.rid, "position": start, "block": block, "match": (key >> 31) & 31}
            file.write(json.dumps(line) + "\n")
    step.tokens[:, 1] = int(os.environ["SGLANG_DFLASH_TEST_REFUSED"])  # a token that the target never chooses
