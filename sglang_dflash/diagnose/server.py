"""What a running server says of itself: ``/server_info`` and, where it is switched on, ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash.diagnose.client import WORKER_KEY, Client
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.pools import RAISED_BY

_EVIDENCE = 64  # verified blocks before their accept length says something of the traffic
QUANTISED = {"target": "quantization", "drafter": "speculative_draft_model_quantization"}
_SIZES = ("--max-mamba-cache-size", "--max-total-tokens")
_FLAGS = "--speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER"


@dataclass(frozen=True)
class Server:
    """A server of DFLASH.

    Attributes:
        ours: whether our worker serves, else SGLang's own.
        dtype: ``auto`` if the server does not say what it chose.
        quantised: methods, by ``target`` and ``drafter``.
        block: positions of every block, of the widest one that the drafter fills if ``adaptive``.
        asked, running: requests at once, of one replica.
        capped_by, raised_by: what keeps more from running, and the flags that would let them.
        copies: what copied blocks brought since the start; None if no block is copied.
        broken_drafts: drafted positions at which the drafter's output was not finite.
        expected: tokens of a full block by the server's own count of survival; None with a fixed width.
        so_far: tokens per step of its recent requests; None if they are too few, or their widths differ.
        unpaid: section ``drafting`` of our worker, if it found that drafting does not pay.
        busy: requests that run now.
        longest_prompt: tokens.
    """

    ours: bool
    target: str
    drafter: str
    dtype: str
    quantised: Mapping[str, str]
    block: int
    adaptive: bool
    asked: int
    running: int
    capped_by: str
    raised_by: str
    copies: str | None
    broken_drafts: int
    expected: float | None
    so_far: float | None
    unpaid: Mapping[str, Any] | None
    busy: int
    longest_prompt: int


async def read(client: Client) -> Server:
    """Ask a server what it is.

    Raises:
        DFlashError: it wants a key, does not serve DFLASH, or cannot render prompts.
    """
    info = await client.server_info()
    try:
        metrics = (await client.get("/metrics")).text
    except DFlashError:  # not exported
        metrics = ""
    return parse(info, metrics)


def parse(info: Mapping[str, Any], metrics: str = "") -> Server:
    """Read ``/server_info`` and ``/metrics``.

    Raises:
        DFlashError: not a server whose drafts can be diagnosed.
    """
    _refuse(info)
    state: Mapping[str, Any] = info["internal_states"][0]
    worker: Mapping[str, Any] = state.get(WORKER_KEY) or {}
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    requests = worker.get("requests") or _requests(info, state)
    drafting = worker.get("drafting") or {}
    sized = [flag for flag in _SIZES if flag in info["launch_command"]]  # what the user fixed is not divided
    curve = worker.get("width", {}).get("survival", {}).get("curve")
    return Server(
        ours=bool(worker),
        target=info["model_path"],
        drafter=info["speculative_draft_model_path"],
        dtype=worker.get("dtype", info["dtype"]),
        quantised={model: info[key] for model, key in QUANTISED.items() if info.get(key)},
        block=worker.get("drafted", info["speculative_num_draft_tokens"]),
        adaptive=worker.get("adaptive", False),
        asked=requests["asked"],
        running=requests["running"],
        capped_by=requests["capped_by"],
        raised_by=", ".join([*(f"a larger {flag}" for flag in sized), requests.get("raised_by", "")]),
        copies=_copies(worker) if worker.get("copied_blocks") else None,
        broken_drafts=worker.get("broken_drafts", 0),
        expected=None if curve is None else 1 + sum(curve),
        so_far=_so_far(state, worker),
        unpaid=drafting if drafting.get("pays") is False else None,
        busy=int(sum(sample.value for sample in samples if sample.name == "sglang:num_running_reqs")),
        longest_prompt=info["max_req_input_len"],
    )


def _refuse(info: Mapping[str, Any]) -> None:
    algorithm = info.get("speculative_algorithm")
    if algorithm != "DFLASH":
        what = f"{algorithm} speculation" if algorithm else "no speculation"
        raise DFlashError(f"a server with {what}", expected="one of DFLASH", remedy=f"start it with {_FLAGS}")
    if info["skip_tokenizer_init"]:
        raise DFlashError(
            "a server without a tokenizer",
            expected="one that renders prompts",
            remedy="start it without --skip-tokenizer-init to diagnose it",
        )


def _requests(info: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Requests at once where the worker does not say what caps them: of SGLang's own, by the kind of target."""
    counts = {
        "asked": info["max_running_requests"] // info.get("attn_dp_size", 1),
        "running": state["effective_max_running_requests_per_dp"],
    }
    if counts["running"] >= counts["asked"]:
        return counts | {"capped_by": "--max-running-requests"}
    cap = "recurrent states" if info.get("uses_mamba_radix_cache") else "tokens of K/V"
    return counts | {"capped_by": cap, "raised_by": RAISED_BY[cap]}


def _copies(worker: Mapping[str, Any]) -> str:
    by_length = {int(length): count for length, count in worker["copied_blocks_by_match_length"].items()}
    copied, blocks = sum(by_length.values()), sum(worker["blocks_by_accept_length"].values())
    if not copied:
        return f"none of {blocks} blocks"
    long = sum(length * count for length, count in by_length.items()) / copied
    brought = worker["tokens_brought_by_copies"]
    return f"{copied} of {blocks} blocks, after matches of {long:.1f} tokens; {brought} tokens more than drafts"


def _so_far(state: Mapping[str, Any], worker: Mapping[str, Any]) -> float | None:
    if not worker:  # an average over whole log intervals, so never of a few steps
        return state.get("avg_spec_accept_length")
    if worker["adaptive"]:
        return None
    if sum(worker["blocks_by_accept_length"].values()) < _EVIDENCE:
        return None  # hardly more than the start's own request, a raw prompt
    recent = (worker.get("drafting") or {}).get("accept_length")
    return recent or worker["mean_accept_length"]
