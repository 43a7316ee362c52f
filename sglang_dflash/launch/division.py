"""Division of a rank's memory, in bytes: measured sizes in a server, predicted ones in ``sglang-dflash check``."""

from dataclasses import dataclass

STATE_SHARE = 0.9  # SGLang's --mamba-full-memory-ratio
TOKENS_PER_REQUEST = 8192  # K/V tokens: with fewer, long answers are retracted and prefilled again
STAGED = 512  # maximum tokens that the drafter's graphs inject
FLOOR = 2 << 30  # kept free for the activations of a prefill
SLIDING_SHARE = 0.8  # SGLang's --swa-full-tokens-ratio
EVICTED = 128  # tokens that leave a window before SGLang frees them, its SGLANG_SWA_EVICTION_INTERVAL


@dataclass(frozen=True)
class TokenPools:
    """K/V pools of a target, in tokens. Its sliding layers may have a smaller one, for a window of each request."""

    tokens: int
    sliding: int | None = None
    window: int = 0  # tokens that a running request has in the sliding pool, at most

    def requests(self, length: int) -> int:
        """Return how many requests of ``length`` tokens fit: they end at the smaller pool."""
        fit = self.tokens // length
        return fit if self.sliding is None else min(fit, self.sliding // min(length, self.window))

    def per_request(self, running: int) -> tuple[int, str]:
        """Return the tokens that each of ``running`` requests can have, and the pool that ends them."""
        full, sliding = (each // max(1, running) for each in (self.tokens, self.sliding or 0))
        if self.sliding is None or sliding >= min(full, self.window):
            return full, "K/V" if self.sliding is None else "K/V of full layers"
        return sliding, "K/V of sliding layers"


def window_tokens(window: int, block: int, page: int) -> int:
    """Return the tokens that a running request has in a pool of sliding layers, at most."""
    return window + EVICTED + 3 * block + page  # a step overlaps the next: one block committed, two reserved


def state_slots(
    free: float, *, ratio: float, records: int, slot: int, per_request: int, requests: int, token: float, context: int,
    window: int = 0,
) -> int:  # fmt: skip
    """Return the recurrent-state slots of a server that replays: enough for ``requests``, as far as K/V allow.

    K/V for one full context and ``TOKENS_PER_REQUEST`` per request must remain. The result is at least SGLang's own. A
    ratio that the user chose decides alone.

    Args:
        free, records: bytes for states, records and K/V; of all replay records.
        ratio: bytes of states per byte of K/V.
        slot: bytes of a slot. The pool has one more for padding.
        per_request: slots of a running request.
        token: bytes per token in all pools that grow with tokens.
        context: tokens of the longest request.
        window: bytes of the drafter's K/V per running request, under a draft window.
    """
    own = int((max(0.0, free) * ratio / (1 + ratio) - records - slot) // slot)
    if ratio != STATE_SHARE:
        return max(0, own)
    rest, each = free - records - slot, per_request * slot + window
    beside_a_context = (rest - context * token) // each
    with_answers = rest // (each + min(TOKENS_PER_REQUEST, context) * token)
    return max(0, own, int(min(requests, beside_a_context, with_answers)) * per_request)


def history_columns(context: int, tokens: int, block: int) -> int:
    """Return the columns of a request's history.

    Two steps may write beyond the text; all later tokens share one column.
    """
    return min(context, tokens) + 2 * block + 2


def sampling(rows: int, vocab: int) -> int:
    """Return the bytes of a sampling step at its peak: float32 logits and their softmax."""
    return 2 * 4 * rows * vocab


def size(count: float) -> str:
    """Return ``"2.27 GiB"`` or the like; an empty string for 0."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.2f} GiB"
    if count >= 1 << 20:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / 1024:.1f} KiB" if count else ""
