"""This package's part in the division of a rank's memory: functions of bytes, which a server calls once both models are
loaded and ``sglang-dflash check`` with the sizes that it expects."""

from __future__ import annotations

STATE_SHARE = 0.9  # SGLang's --mamba-full-memory-ratio
TOKENS_PER_REQUEST = 8192  # of K/V: with fewer, long answers are retracted and prefilled again
STAGED = 512  # most tokens that the drafter's graphs inject: with more, a step is not bound by its launches
FLOOR = 2 << 30  # bytes that stay free for the activations of a prefill


def state_slots(
    free: float, *, ratio: float, records: int, slot: int, per_request: int, requests: int, token: int, context: int,
    rings: int = 0,
) -> int:  # fmt: skip
    """Return the recurrent-state slots of a server that replays: as many as ``requests`` need, if K/V remain.

    K/V remain for one whole context, and for ``TOKENS_PER_REQUEST`` of every request. SGLang's own division is the
    least. A ratio that the user chose decides alone.

    Args:
        free: bytes for states, records and K/V.
        ratio: states per K/V, in bytes.
        records: bytes of all requests' replay records, which SGLang takes from the states' part.
        slot: bytes of a slot, of which the pool has one more for padding.
        per_request: slots of a running request.
        requests: that are to run at once.
        token: bytes of a token's K/V, in all pools that grow with tokens.
        context: tokens of the longest request.
        rings: bytes of the drafter's K/V under a draft window.
    """
    own = int((max(0.0, free) * ratio / (1 + ratio) - records - slot) // slot)
    if ratio != STATE_SHARE:
        return max(0, own)
    rest, each = free - records - slot - rings, per_request * slot
    beside_a_context = (rest - context * token) // each
    with_answers = rest // (each + min(TOKENS_PER_REQUEST, context) * token)
    return max(0, own, int(min(requests, beside_a_context, with_answers)) * per_request)


def rings(running: int, in_transfer: int | None) -> int:
    """Rings of the drafter's K/V. A disaggregated server has one per row number, padding included."""
    return running if in_transfer is None else 1 + running + in_transfer


def history_columns(context: int, tokens: int, block: int) -> int:
    """Return the columns of a request's history, for copied blocks.

    No request outgrows the context or the K/V pool. The step after the one that ends a request is already launched, so
    two blocks may lie beyond. All tokens further on share one column.
    """
    return min(context, tokens) + 2 * block + 2


def sampling(rows: int, vocab: int) -> int:
    """Bytes of a sampling step at its peak: float32 logits and their softmax."""
    return 2 * 4 * rows * vocab


def size(count: float) -> str:
    """``"2.27 GiB"``, ``"41.0 MiB"``, ``"20.0 KiB"``; nothing for none."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.2f} GiB"
    if count >= 1 << 20:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / 1024:.1f} KiB" if count else ""
