"""The copies from host to device that a step may make inside the no-sync guard."""

from __future__ import annotations

import json
from pathlib import Path

# File and function; each has one such line.
LISTED = {
    # ours
    "sglang_dflash/worker/sampling/penalties.py ban_early_stops: async_h2d",
    "sglang_dflash/worker/sampling/seeded.py mark_seeded_rows: async_h2d",
    # SGLang's, which let the host go on
    "sglang/srt/managers/schedule_batch.py set_mamba_track_indices_from_reqs: async_h2d",
    "sglang/srt/layers/logprob_processor.py get_token_ids_logprobs_raw: to",
    # the graph runners' copy of ``seq_lens_cpu`` into a buffer that is on the host too
    "sglang/srt/model_executor/cuda_graph_buffer_registry.py fill_from: host tensor among the device's",
}
# SGLang's, depending on how requests meet.
_SOMETIMES = {
    # ids of a prefill's log-probabilities, pinned, which stay on the batch
    "sglang/srt/model_executor/forward_batch_info.py init_new: to",
    # from pageable memory, where a request ended under the step: ``no_sync.EXCUSED`` names it
    "sglang/srt/managers/schedule_batch.py set_mamba_track_indices_from_reqs: list as index",
}
# The CPU platform's stand-ins for kernels make tensors that a kernel does not need.
_STAND_INS = "sglang_dflash_cpu/"


def copies(folder: Path) -> dict[str, int]:
    """What the plugin's mode ``host_copies`` found: the number of lines by file and function."""
    found = json.loads((folder / "host_copies.json").read_text())
    return {
        where: len(lines)
        for where, lines in found.items()
        if not where.startswith(_STAND_INS) and where not in _SOMETIMES
    }
