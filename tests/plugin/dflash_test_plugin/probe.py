"""Modes that record what the worker does, from inside the server, in the folder ``SGLANG_DFLASH_TEST_FOLDER``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

FOLDER = Path(os.environ.get("SGLANG_DFLASH_TEST_FOLDER", "."))
COMMIT = "sglang_dflash.states.commit.RecurrentCommit.advance"
DECODE = "sglang_dflash.worker.worker.DFlashWorker._decode"
DRAFT = "sglang_dflash.worker.forwards.Draft.draft"
FORWARD = "sglang_dflash.model.drafter.DFlashDraftModel.forward"
PREFILL = "sglang_dflash.worker.worker.DFlashWorker._prefill"


def _hook(when: str, target: str, function: Callable[..., Any]) -> None:
    HookRegistry.register(target, function, HookType[when])


def _write(file: str, **line: Any) -> None:
    with (FOLDER / file).open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def drafts() -> None:
    """``drafts.jsonl``: per request and step, the block's first position and its tokens, anchor first."""

    def record(_: None, draft: Any, step: Any) -> None:
        for req, start, block in zip(step.batch.reqs, step.batch.seq_lens.tolist(), step.tokens.tolist(), strict=True):
            _write("drafts.jsonl", rid=req.rid, position=start, block=block)

    _hook("AFTER", DRAFT, record)


def sglangs_drafts() -> None:
    """The same of SGLang's own worker, without the request."""

    def record(_: Any, *, candidates: Any, prefix_lens: Any, **__: Any) -> None:
        for start, block in zip(prefix_lens.tolist(), candidates.tolist(), strict=True):
            _write("drafts.jsonl", rid=None, position=start, block=block)

    _hook("BEFORE", "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._accept_block", record)


def states() -> None:
    """``state-<rid>-<length>.pt``: the recurrent state of a request after so many tokens, of each prefill and block."""

    def save(batch: Any, lengths: list[int], pool: Any) -> None:
        cache, slots = pool.mamba_pool.mamba_cache, pool.get_mamba_indices(batch.req_pool_indices).tolist()
        for req, length, slot in zip(batch.reqs, lengths, slots, strict=True):
            state = {"temporal": cache.temporal[:, slot].clone(), "conv": [c[:, slot].clone() for c in cache.conv]}
            torch.save(state, FOLDER / f"state-{req.rid}-{length}.pt")

    def committed(_: None, commit: Any, step: Any) -> None:
        save(step.batch, step.accepted.new_seq_lens.tolist(), commit._requests)

    def prefilled(result: Any, worker: Any, batch: Any, *_: Any) -> None:
        save(batch, batch.seq_lens.tolist(), worker.target_worker.model_runner.req_to_token_pool)

    _hook("AFTER", COMMIT, committed)
    _hook("AFTER", PREFILL, prefilled)


def replays() -> None:
    """``replays.jsonl``: the first request, the number of requests and the width of each step that replays states."""

    def record(commit: Any, step: Any, *_: Any) -> None:
        _write("replays.jsonl", rid=step.batch.reqs[0].rid, requests=len(step.batch.reqs), width=step.width)

    _hook("BEFORE", "sglang_dflash.states.commit.RecurrentCommit._commit", record)


def rounds() -> None:
    """``rounds-<rank>.jsonl``: each step's width and the rank's own requests; checks each forward's arguments."""

    def record(step: Any, worker: Any, batch: Any) -> Any:
        _write(f"rounds-{_rank()}.jsonl", width=step.width, requests=len(batch.reqs))
        return step

    def draft(model: Any, input_ids: Any, positions: Any, forward_batch: Any) -> None:
        assert forward_batch.global_num_tokens_cpu is None, "the drafter runs on the ranks that share a batch alone"

    def verify(worker: Any, batch: Any = None, forward_batch: Any = None, is_verify: bool = False, **_: Any) -> None:
        if is_verify:  # SGLang pads the batch for the other ranks, so nothing is planned for it before
            assert not forward_batch.forward_metadata_ready and forward_batch.global_num_tokens_cpu is not None

    _hook("AFTER", "sglang_dflash.features.step_width.Width.pick", record)
    _hook("BEFORE", FORWARD, draft)
    _hook("BEFORE", "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", verify)


def history() -> None:
    """Before each decode step the device's history of each request is what the host knows of it.

    A wrong history changes no text, only what is copied. With overlap the host's tokens lag by a step.
    ``histories.txt`` counts the comparisons.
    """
    compared = 0

    def compare(worker: Any, batch: Any, *_: Any) -> None:
        nonlocal compared
        copies, most = worker._features[0], worker.plan.block
        for row, req, length in zip(batch.req_pool_indices.tolist(), batch.reqs, batch.seq_lens.tolist(), strict=True):
            tokens = np.concatenate([np.array(ids, dtype=np.int64) for ids in (req.origin_input_ids, req.output_ids)])
            known = np.where((tokens >= 0) & (tokens < copies._vocabulary), tokens, -1)[: length + 1]
            wrong = np.flatnonzero(copies.history[row, : len(known)].numpy() != known)
            assert not len(wrong), f"history of {req.rid}, row {row}, {length} tokens: other tokens at {wrong[:9]}"
            assert req.finished() or length + 1 - len(known) <= most, f"{req.rid}: {length} tokens, {len(known)} known"
            compared += 1
        (FOLDER / "histories.txt").write_text(str(compared))

    _hook("BEFORE", DECODE, compare)


def pools() -> None:
    """Add lost slots to ``/server_info``; of a server at rest all must be 0."""

    def count_lost(result: Any, scheduler: Any, *_: Any) -> Any:
        requests, cache = scheduler.req_to_token_pool, scheduler.tree_cache
        stats = scheduler.pool_stats_observer.get_pool_stats()
        lost = result.internal_state["pools"] = {
            "kv slots": stats.full_capacity - stats.full_available_size - stats.full_evictable_size,
            # A row has its ring of the drafter's K/V and its records of a block.
            "rows": requests.size + requests.pre_alloc_size - requests.available_size(),
            "locked in the prefix cache": cache.full_protected_size(),
            "steps without counts": len(scheduler.draft_worker._flight._steps),
        }
        if stats.is_hybrid_swa:
            lost["sliding slots"] = stats.swa_capacity - stats.swa_available_size - stats.swa_evictable_size
        if stats.is_hybrid_ssm:
            states = requests.mamba_pool.size
            lost["states"] = states - stats.mamba_available_size - stats.mamba_evictable_size
            lost["locked states"] = cache.mamba_protected_size()
        if (rings := scheduler.draft_worker.rings) is not None:
            lost["tail slots"] = rings.tails._size - len(rings.tails._free) - int((rings.tails._uses > 0).sum())
        return result

    _hook("AFTER", "sglang.srt.managers.scheduler.Scheduler.get_internal_state", count_lost)


def memory() -> None:
    """Add ``memory_bytes`` of our worker to ``/server_info``: what each pool allocated."""

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def of_kv(pool: Any) -> int:
        found = pool.get_kv_size_bytes()  # of K and V, or one number of latent K/V (MLA)
        return int(sum(found) if isinstance(found, tuple) else found)  # a numpy integer is not JSON

    def of_states(requests: Any) -> tuple[int, int]:
        pool = getattr(requests, "mamba_pool", None)
        if pool is None:
            return 0, 0
        cache = pool.mamba_cache
        found, whole = size([*cache.conv, cache.temporal]), int(cache.mem_usage_bytes())
        # Convolution windows overlap in storage, so their view is larger than the allocation.
        windows = getattr(cache, "intermediate_conv_window", [])
        allocated = getattr(pool, "_intermediate_conv_window_phys", None) or windows
        return found, whole - found - size(windows) + size(allocated)

    def add(info: dict[str, Any], worker: Any) -> dict[str, Any]:
        target, drafter = worker._target, worker.drafter
        pool, (found, scratch) = target.token_to_kv_pool, of_states(target.req_to_token_pool)
        sliding = of_kv(pool.swa_kv_pool) if hasattr(pool, "swa_kv_pool") else 0
        histories = [copies.history for copies in worker._features if hasattr(copies, "history")]
        sizes = {
            "target_weights": size(target.model.parameters()),
            "drafter_weights": 0 if drafter is None else size(drafter.model.parameters()),
            "target_kv": of_kv(pool) - sliding,
            "sliding_kv": sliding,
            "draft_kv": 0 if drafter is None else of_kv(drafter.token_to_kv_pool),
            "states": found,
            "scratch": scratch,
            "history": size(histories),
        }
        return {**info, "memory_bytes": sizes}

    _hook("AFTER", "sglang_dflash.worker.worker.DFlashWorker.server_info", add)


def tails() -> None:
    """A prefix hit copies only slots that were written for the same tokens at the same positions."""
    written: dict[int, int] = {}

    def texts(req: Any, end: int, slots: Any) -> dict[int, int]:
        text = np.array([*req.origin_input_ids, *req.output_ids][:end], dtype=np.int32)
        return {slot: hash(text[: end - i].tobytes()) for i, slot in enumerate(slots.tolist()[::-1])}

    def keep(_: None, rings: Any, req: Any) -> None:
        if (tail := rings.tails.find(req.last_node, req.kv.cache_protected_len)) is not None:
            written.update(texts(req, tail.end, tail.slots))

    def start(original: Callable[..., None], rings: Any, row: int, req: Any, prefix: int) -> None:
        before = len(rings.copies)
        original(rings, row, req, prefix)
        for _, slots in rings.copies[before:]:
            read = texts(req, prefix, slots)
            assert read == {slot: written[slot] for slot in read}, f"{req.rid} reads the tail of another text"

    _hook("AFTER", "sglang_dflash.features.window.DraftRings.store_tail", keep)
    _hook("AROUND", "sglang_dflash.features.window.DraftRings._start", start)


def acceptance() -> None:
    """Blocks of the width in the folder's file ``width``, of which every draft is refused: each position has a step.

    ``acceptance.jsonl``: per request and step, the block from the anchor at ``position`` on, and the length of the
    match that it could copy.
    """

    def record_and_refuse(_: None, copies: Any, step: Any) -> None:
        if step.width == 1:
            return
        rows = copies.found[step.batch.req_pool_indices, 0].tolist()
        starts, blocks = step.batch.seq_lens.tolist(), step.tokens.tolist()
        for req, start, block, key in zip(step.batch.reqs, starts, blocks, rows, strict=True):
            _write("acceptance.jsonl", rid=req.rid, position=start, block=block, match=(key >> 31) & 31)
        step.tokens[:, 1] = int(os.environ["SGLANG_DFLASH_TEST_REFUSED"])  # a token that the target never chooses

    _hook("AFTER", "dflash_test_plugin.policies.RandomWidth.width", lambda *_: int((FOLDER / "width").read_text()))
    _hook("AFTER", "sglang_dflash.features.copies.Copies.after_draft", record_and_refuse)
