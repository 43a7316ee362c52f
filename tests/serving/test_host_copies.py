"""Every copy from host to device inside the guarded part of a step is listed; a new one fails.

Such a copy makes the host wait for the device if the memory is not pinned. ``async_h2d`` is SGLang's copy from pinned
memory; ``tests/plugin/dflash_test_plugin/host_copies.py`` says how copies are found on a CPU, and what that hides.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

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


SEEN = (
    "torch.tensor([1], device=x.device)",
    "x.new_tensor([1])",
    "torch.tensor([1]).to(x.device)",
    "torch.tensor([1]).to('cpu', non_blocking=True)",
    "x[[0, 1]]",
    "x.__setitem__(([0, 1],), 1)",
    "x[torch.tensor([0, 1])]",
    "x.__setitem__(0, torch.tensor(1))",
    "x.copy_(torch.ones(4))",
    "x + torch.arange(4)",
    "x + host",
    "torch.cat([x, torch.zeros(1)])",
)
PASSED = (
    "x[x.long()] + torch.arange(4, device=x.device)",
    "x * torch.tensor(2.0)",
    "torch.tensor([1, 2]) + torch.arange(2)",
    "x.to(torch.int64).to(x.device)",
    "x.__setitem__(slice(2), 1)",
)
# What has been copied is the device's.
ONCE = "torch.tensor([0, 1]).to(x.device) + x[:2]"


@pytest.mark.parametrize("line", (*SEEN, *PASSED, ONCE))
def test_what_the_list_sees(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "plugin"))
    from dflash_test_plugin import host_copies

    monkeypatch.setattr(host_copies, "FOLDER", tmp_path)
    host_copies._found.clear()
    host, names = torch.arange(4), {"torch": torch, "x": torch.zeros(4)}
    with torch.inference_mode(), host_copies.Copies([host]):
        exec(compile(line, "/site-packages/sglang_dflash/planted.py", "exec"), {**names, "host": host})
    assert len(host_copies._found) == (line not in PASSED)
