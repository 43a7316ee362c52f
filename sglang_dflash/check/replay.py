"""Which of the two ways to keep states a server takes that is started with these flags."""

from __future__ import annotations

import os
from typing import Any

from sglang_dflash.memory.fit import Demand
from sglang_dflash.memory.machine import Machine
from sglang_dflash.memory.replay import worth_it

_BACKENDS = ("triton", "flashinfer")  # SGLang's, for a replay


def is_replayed(args: Any, machine: Machine, demand: Demand, static_bytes: int) -> bool:
    """Whether states are replayed: as ``hooks/state_replay.py`` decides before the server starts.

    Args:
        args: server arguments by SGLang's names.
        static_bytes: memory to divide, 0 if unknown.
    """
    backend = args.linear_attn_decode_backend or args.linear_attn_backend
    if not demand.state.slot or backend not in _BACKENDS or args.enable_linear_replayssm:
        return False
    forced = os.environ.get("SGLANG_DFLASH_STATE_REPLAY")
    if args.enable_linear_replayssm_spec or forced:
        return bool(args.enable_linear_replayssm_spec) or forced == "1"
    return machine.kind == "cpu" or worth_it(demand, static_bytes)
