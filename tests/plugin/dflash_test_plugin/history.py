"""Mode ``history``: before every decode step the device's history of each request is what the host knows of it.

A wrong history changes no text, only what is copied. With overlap the host's tokens lag by a step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

COUNT = Path(os.environ.get("SGLANG_DFLASH_TEST_FOLDER", ".")) / "histories.txt"
_compared = 0


def compare(worker: Any, batch: Any, *_: Any) -> None:
    """Before ``DFlashWorker._decode``."""
    global _compared
    copies, most = worker._copies, worker.plan.block
    for row, req, length in zip(batch.req_pool_indices.tolist(), batch.reqs, batch.seq_lens.tolist(), strict=True):
        tokens = [
            token if 0 <= token < copies._vocabulary else -1 for token in (*req.origin_input_ids, *req.output_ids)
        ]
        known = tokens[: length + 1]
        held = copies.history[row, : len(known)].tolist()
        wrong = [at for at, pair in enumerate(zip(held, known, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"history of {req.rid}, row {row}, {length} tokens: other tokens at {wrong[:9]}"
        assert req.finished() or length + 1 - len(known) <= most, f"{req.rid}: {length} tokens, {len(known)} known"
        _compared += 1
    COUNT.write_text(str(_compared))
