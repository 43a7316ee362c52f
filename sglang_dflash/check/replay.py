"""Which of the two ways to keep the states of a block a server takes that is started with these flags."""

from __future__ import annotations

import os
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.fit import Demand
from sglang_dflash.memory.machine import Machine
from sglang_dflash.memory.replay import ring_length, worth_it
from sglang_dflash.memory.split import share

SWITCH = "SGLANG_DFLASH_STATE_REPLAY"
FLAG, LENGTH_FLAG = "--enable-linear-replayssm-spec", "--linear-replayssm-cache-len"
_LENGTH_UNSET = 16  # SGLang's default, which a user's own 16 cannot be told from
_RATIO_UNSET = (None, 0.9)  # likewise
_BACKENDS = ("triton", "flashinfer")  # SGLang's, for a replay


def is_replayed(args: Any, machine: Machine, demand: Demand, static_bytes: int) -> bool:
    """Whether states are replayed.

    A replay must show on a GPU that it is no slower; until then it is taken there where it lets more requests run.

    Args:
        args: server arguments by SGLang's names.
        static_bytes: memory to divide, 0 if unknown.

    Raises:
        DFlashError: the switch holds an unknown word, or contradicts the flag.
    """
    if not demand.state.slot or reason_against(args):
        return False
    asked = asked_for(args)
    if asked is not None:
        return asked
    return machine.kind == "cpu" or worth_it(demand, static_bytes)


def asked_for(args: Any) -> bool | None:
    """What the user says, with SGLang's flag or with our switch; None if nothing.

    Raises:
        DFlashError: the switch holds an unknown word, or contradicts the flag.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise DFlashError(f"{SWITCH}={value!r}", expected="0, 1, or unset", remedy=f"unset {SWITCH}")
    if value == "0" and args.enable_linear_replayssm_spec:
        raise DFlashError(f"{FLAG} and {SWITCH}=0", expected="one of them", remedy=f"unset {SWITCH}")
    return True if args.enable_linear_replayssm_spec else None if value == "" else value == "1"


def reason_against(args: Any) -> str | None:
    """What keeps states from being replayed; None if nothing does. SGLang checks the same where its flag is set."""
    backend = args.linear_attn_decode_backend or args.linear_attn_backend
    reasons = {
        f"the linear-attention backend is {backend}": backend not in _BACKENDS,
        "--enable-linear-replayssm keeps records of its own": args.enable_linear_replayssm,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def better_ratio(args: Any, demand: Demand, static_bytes: int) -> float | None:
    """``--mamba-full-memory-ratio`` for a server that replays states; None if the user chose one."""
    if args.mamba_full_memory_ratio not in _RATIO_UNSET:
        return None
    return share(demand, static_bytes, replay=True)


def length(args: Any, block: int) -> int:
    """Positions of a request's records: a block of any width fits, and every commit empties them.

    Raises:
        DFlashError: the user chose fewer. SGLang does not look, and the tokens would be wrong.
    """
    asked, needed = args.linear_replayssm_cache_len, ring_length(block)
    if asked == _LENGTH_UNSET:
        return needed
    if asked < needed or asked & (asked - 1):
        raise DFlashError(
            f"{LENGTH_FLAG} {asked}",
            expected=f"a power of two, at least {needed} for blocks of {block}",
            remedy=f"leave {LENGTH_FLAG} out",
        )
    return int(asked)
