"""Mode ``history``: before every decode step the device's history of each request is what the host knows of it.

A wrong history changes no text, only what is copied. With overlap the host's tokens lag by a step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

COUNT = Path(os.environ.get("SGLANG_DFLASH_TEST_FOLDER", ".")) / "histories.txt"
_compared = 0


def compare(worker: Any, batch: Any, *_: Any) -> None:
    """Before ``DFlashWorker._decode``."""
    global _compared
    copies, most = worker._copies, worker.plan.block
    for row, req, length in zip(batch.req_pool_indices.tolist(), batch.reqs, batch.seq_lens.tolist(), strict=True):
        tokens = np.concatenate([np.array(ids, dtype=np.int64) for ids in (req.origin_input_ids, req.output_ids)])
        known = np.where((tokens >= 0) & (tokens < copies._vocabulary), tokens, -1)[: length + 1]
        wrong = np.flatnonzero(copies.history[row, : len(known)].numpy() != known)
        assert not len(wrong), f"history of {req.rid}, row {row}, {length} tokens: other tokens at {wrong[:9]}"
        assert req.finished() or length + 1 - len(known) <= most, f"{req.rid}: {length} tokens, {len(known)} known"
        _compared += 1
    COUNT.write_text(str(_compared))
