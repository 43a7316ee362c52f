"""Keep every state inside a block, or replay them from records: the rule and what each way costs."""

from __future__ import annotations

import os
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.machine import Machine

SWITCH = "SGLANG_DFLASH_STATE_REPLAY"
FLAG, LENGTH_FLAG = "--enable-linear-replayssm-spec", "--linear-replayssm-cache-len"
_LENGTH_UNSET = 16  # SGLang's default, indistinguishable from a user's own 16
_SHORTEST_RING = 16  # SGLang's kernels multiply tiles of at least 16 positions
_BACKENDS = ("triton", "flashinfer")  # the linear-attention backends with a replay


def asked_for(args: Any) -> bool | None:
    """The user's choice, by SGLang's flag or by our switch: True to replay, False to keep, None if open.

    Args:
        args: server arguments by SGLang's names.

    Raises:
        DFlashError: the switch holds an unknown word or contradicts the flag, or a replay cannot be served.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise DFlashError(f"{SWITCH}={value!r}", expected="0, 1, or unset", remedy=f"unset {SWITCH}")
    if value == "0" and args.enable_linear_replayssm_spec:
        raise DFlashError(f"{FLAG} and {SWITCH}=0", expected="one of them", remedy=f"unset {SWITCH}")
    if value == "1" or args.enable_linear_replayssm_spec:
        if against := reason_against(args):
            raise DFlashError(
                against, expected=f"a server that can replay states ({FLAG})", remedy=f"leave {FLAG} and {SWITCH} out"
            )
        return True
    return None if value == "" else False


def is_replayed(args: Any, machine: Machine, asked: bool | None, *, lets_more_run: bool) -> bool:
    """Whether a hybrid target's states are replayed.

    On a GPU a replay has yet to show that it is no slower, so it is chosen there only where more of the requested
    requests can run with it.

    Args:
        args: server arguments by SGLang's names.
        asked: the user's choice (:func:`asked_for`).
        lets_more_run: whether more of the requested requests can run with a replay, as far as memory is known.
    """
    if asked is not None or reason_against(args):
        return bool(asked)
    if machine.kind == "cpu":
        return True
    return lets_more_run


def reason_against(args: Any) -> str | None:
    """Return the reason that rules a state replay out; None if there is none. SGLang's own flag has the same rules."""
    backend = decode_backend(args)
    reasons = {
        f"the linear-attention backend is {backend}": backend not in _BACKENDS,
        "--enable-linear-replayssm keeps records of its own": args.enable_linear_replayssm,
        "a prefill server verifies nothing (--disaggregation-mode prefill)": args.disaggregation_mode == "prefill",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def decode_backend(args: Any) -> str:
    """The linear-attention backend of plain decoding.

    Args:
        args: server arguments by SGLang's names, or what its runtime context has of them (``get_exec().mamba``).
    """
    return str(args.linear_attn_decode_backend or args.linear_attn_backend)


def ring_length(block: int) -> int:
    """Positions of a request's records: the smallest power of two that holds a block of ``block`` tokens.

    A ring this short is full after every verify, so every commit brings the state up to date: the prefix cache never
    receives a stale one, and the next block may have any width.
    """
    return max(_SHORTEST_RING, 1 << (block - 1).bit_length())


def record_length(args: Any, block: int) -> int:
    """Positions of a request's records under these arguments.

    Raises:
        DFlashError: the user chose fewer than a block needs. SGLang does not check, and the tokens would be wrong.
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
