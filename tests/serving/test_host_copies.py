"""Every copy from host to device inside the guarded part of a step is listed; a new one fails.

Such a copy makes the host wait for the device if the memory is not pinned. ``async_h2d`` is SGLang's copy from pinned
memory; ``tests/plugin/dflash_test_plugin/host_copies.py`` says how copies are found on a CPU, and what that hides.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.generation import Params, generate
from tests.support.host_copies import LISTED, copies
from tests.support.pair_servers import RecordedServer
from tests.support.prompts import corpus

pytestmark = pytest.mark.engine

FILTERS = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
REQUESTS: tuple[tuple[Params, Params], ...] = (
    ({"temperature": 0}, {}),
    ({"temperature": 0}, {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 6]}),
    (FILTERS, {"return_logprob": True}),
    ({**FILTERS, "sampling_seed": 7}, {}),
    ({"temperature": 1.0, "min_new_tokens": 20, "frequency_penalty": 0.5, "repetition_penalty": 1.2}, {}),
    ({"temperature": 0, "presence_penalty": 0.5, "logit_bias": {"5": 1.0}}, {}),
)


def test_host_copies(recorded_hybrid: RecordedServer) -> None:
    prompts = corpus("tiny-hybrid", 4 * len(REQUESTS), 3)

    def ask(i: int) -> int:
        params, body = REQUESTS[i % len(REQUESTS)]
        # Different lengths, so that requests end while the next step is already launched.
        limit = 24 + 5 * i % 40
        return len(generate(recorded_hybrid.server, prompts[i], limit, sampling_params=params, **body).tokens)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(len(prompts))))
    assert copies(recorded_hybrid.folder) == dict.fromkeys(LISTED, 1)
