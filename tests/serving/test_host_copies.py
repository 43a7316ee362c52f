"""Every copy from host to device inside the guarded part of a step is listed; a new one fails.

Such a copy makes the host wait for the device if the memory is not pinned. ``async_h2d`` is SGLang's copy from pinned
memory; ``tests/plugin/dflash_test_plugin/host_copies.py`` documents how copies are found on a CPU, and what that hides.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.generation import Params, generate
from tests.support.pair_servers import RecordedServer
from tests.support.prompts import corpus

pytestmark = pytest.mark.engine

# File and function; each has one such line.
LISTED = {
    # our copies
    "sglang_dflash/worker/sampling/penalties.py ban_early_stops: async_h2d",
    # SGLang's copies, which do not block the host
    "sglang/srt/managers/schedule_batch.py set_mamba_track_indices_from_reqs: async_h2d",
    "sglang/srt/layers/logprob_processor.py get_token_ids_logprobs_raw: to",
    # the graph runners' copy of ``seq_lens_cpu`` into a host buffer
    "sglang/srt/model_executor/cuda_graph_buffer_registry.py fill_from: host tensor among the device's",
}
# SGLang's copies that depend on how requests overlap.
SOMETIMES = {
    # ids of a prefill's log-probabilities, pinned, which stay on the batch
    "sglang/srt/model_executor/forward_batch_info.py init_new: to",
    # from pageable memory, where a request ended under the step: ``no_sync.EXCUSED`` names it
    "sglang/srt/managers/schedule_batch.py set_mamba_track_indices_from_reqs: list as index",
}
# The CPU platform's stand-ins for kernels make tensors that a kernel does not need.
STAND_INS = "sglang_dflash_cpu/"

FILTERS = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
REQUESTS: tuple[tuple[Params, Params], ...] = (
    ({"temperature": 0}, {}),
    ({"temperature": 0}, {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 6]}),
    (FILTERS, {"return_logprob": True}),
    ({**FILTERS, "sampling_seed": 7}, {}),
    ({"temperature": 1.0, "min_new_tokens": 20, "frequency_penalty": 0.5, "repetition_penalty": 1.2}, {}),
    ({"temperature": 0, "presence_penalty": 0.5, "logit_bias": {"5": 1.0}}, {}),
)


def test_a_step_makes_the_listed_host_copies_and_no_other(recorded_hybrid: RecordedServer) -> None:
    prompts = corpus("tiny-hybrid", 4 * len(REQUESTS), 3)

    def ask(i: int) -> int:
        params, body = REQUESTS[i % len(REQUESTS)]
        # Different lengths, so that requests end while the next step is already launched.
        limit = 24 + 5 * i % 40
        return len(generate(recorded_hybrid.server, prompts[i], limit, sampling_params=params, **body).tokens)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(len(prompts))))
    found = json.loads((recorded_hybrid.folder / "host_copies.json").read_text())
    lines = {where: len(lines) for where, lines in found.items() if not where.startswith(STAND_INS)}
    assert {where: count for where, count in lines.items() if where not in SOMETIMES} == dict.fromkeys(LISTED, 1)
