"""Every flag of the tested SGLang by name, and those that the preflight may leave unread.

``sglang_flags.json`` is written by ``make drift`` from SGLang's own parser, which takes seconds to import.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from sglang_dflash.check.findings import Finding

LIST = Path(__file__).with_name("sglang_flags.json")


@dataclass(frozen=True)
class Flag:
    """A flag of SGLang.

    Attributes:
        names: its spellings, the usual one first.
        group: SGLang's configuration namespace of its field, such as ``"exec.moe"``; empty if it has none.
        values: how many words follow it, as argparse's ``nargs``; 1 for one.
        type: ``"int"``, ``"float"``, ``"count"`` for a number with a suffix such as ``32k``, or ``"str"``.
        choices: the accepted values; empty if SGLang's parser accepts any.
    """

    names: list[str]
    group: str = ""
    values: int | str = 1
    type: str = "str"
    choices: list[str | int] = field(default_factory=list)


@cache
def known_flags() -> tuple[Flag, ...]:
    return tuple(Flag(**each) for each in json.loads(LIST.read_text(encoding="utf-8")))


def nearest(word: str) -> str | None:
    """The flag whose spelling is nearest to ``word``; None if none is similar."""
    names = [name for flag in known_flags() for name in flag.names]
    return next(iter(get_close_matches(word.partition("=")[0], names, 1)), None)


# These configure the HTTP server, logs, metrics and host processes.
_HARMLESS_GROUPS = {"device", "observability", "serving"}
HARMFUL = {"--base-gpu-id", "--forward-hooks", "--kv-canary", "--kv-canary-real-data", "--use-ray"}
# Of the other groups: weight loading, kernel choices, scheduling order, transports and image preprocessing.
HARMLESS = (
    *("--checkpoint-engine-", "--download-dir", "--engine-info-bootstrap-port", "--load-format", "--model-checksum"),
    *("--model-loader-extra-config", "--modelexpress-config", "--remote-instance-", "--startup-weight-load-mode"),
    *("--speculative-draft-load-format", "--weight-cache-", "--weight-loader-"),
    *("--bf16-gemm-backend", "--cuda-graph-backend-prefill", "--disable-custom-all-reduce", "--flashinfer-a"),
    *("--disable-flashinfer-autotune", "--enable-flashinfer-allreduce-fusion", "--fp4-gemm-backend"),
    *("--enforce-disable-flashinfer-allreduce-fusion", "--fp8-gemm-backend", "--moe-runner-backend"),
    *("--disable-outlines-disk-cache", "--enable-custom-logit-processor", "--grammar-backend", "--sampling-backend"),
    *("--abort-on-priority-when-disabled", "--default-priority-value", "--disable-priority-preemption"),
    *("--enable-prefill-delayer", "--enable-priority-scheduling", "--max-queued-requests", "--min-free-slots-delay"),
    *("--prefill-decode-interval", "--prefill-delayer-", "--prefill-max-requests", "--priority-scheduling-"),
    *("--radix-eviction-policy", "--retraction-policy", "--schedule-", "--scheduler-recv-interval"),
    *("--dist-", "--enable-p2p-check", "--load-balance-method", "--nccl-port", "--nnodes", "--node-rank"),
    *("--disaggregation-bootstrap-port", "--disaggregation-decode-polling-interval", "--disaggregation-ib-device"),
    *("--disaggregation-enable-kv-checksum", "--disaggregation-transfer-backend", "--optimistic-prefill-attempts"),
    *("--allowed-media-domains", "--image-processor-backend", "--limit-mm-data-per-request", "--media-url-max"),
    *("--mm-io-", "--mm-preprocess-", "--mm-process", "--trust-mm-content-hashes"),
)
_EFFECTS = {
    "lora": "LoRA adapters and their buffers take memory that is not counted",
    "memory": "they change the prefix cache, which is counted as SGLang's own on the device",
    "": "the flags in this file are not read",
}


def check_unread(unread: Iterable[str]) -> Iterator[Finding]:
    """Findings on flags that the preflight does not read: warnings, except for flags that cannot change its result."""
    harmless, harmful = [], dict[str, list[str]]()
    given = set(unread)
    for flag in known_flags():
        if (name := flag.names[0]) not in given:
            continue
        if name not in HARMFUL and (flag.group in _HARMLESS_GROUPS or name.startswith(HARMLESS)):
            harmless.append(name)
        else:
            effect = _EFFECTS.get(flag.group, "they may change memory, kernels or parallelism")
            harmful.setdefault(effect, []).append(name)
    if harmless:
        yield Finding("ok", "flags not looked at", " ".join(harmless))
    for effect, names in harmful.items():
        yield Finding(
            "warn",
            "flags not counted",
            f"{' '.join(names)}: {effect}",
            expected="flags that this check reads",
            remedy="read the memory that the server logs at its start, and lower --mem-fraction-static if it runs out",
        )
