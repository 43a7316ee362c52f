"""The serving plan, how a launch decides it, and the worker that serves it in this process."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.formats import FULL
from sglang_dflash.launch.division import TOKENS_PER_REQUEST
from sglang_dflash.launch.exact import is_requested, reasons_against_exact
from sglang_dflash.launch.launch import OUR_BACKEND, Launch
from sglang_dflash.launch.settings import VERIFY_SWITCH
from sglang_dflash.launch.states import record_length, replays, resumes_retracted, snapshot_grid, state_dtype
from sglang_dflash.launch.width_config import widths_for

if TYPE_CHECKING:
    from sglang_dflash.worker.worker import DFlashWorker

Role = Literal["null", "prefill", "decode"]  # --disaggregation-mode
CONVERSATION = 1024  # tokens that a conversation's tails span in addition to a window


@dataclass(frozen=True)
class DraftWindow:
    """The span of context that the drafter reads, and the slots that it needs."""

    tokens: int  # before the block
    block: int  # positions of the widest block
    page: int  # slots
    lag: int = 0  # at most this many tokens of a request follow its cached prefix
    cached: bool = False  # whether prefixes are cached

    def start(self, end: int) -> int:
        """Return the first token that a block after ``end`` tokens reads."""
        start = max(0, end - self.tokens)
        return start - start % self.page

    def tail_slots(self, context: int) -> int:
        """Return the slots per request for tails, in whole pages: a window, plus up to 1,024 tokens for other prefixes.

        SGLang's fa3, fa4 and trtllm_mha divide a pool into pages (``mem_cache/layout/paged_view.py``).
        """
        one = min(self.tokens, context + self.block) + self.page - 1
        return self._in_pages(one + min(3 * one, CONVERSATION)) if self.cached else 0

    def ring_slots(self, context: int) -> int:
        """Return the slots per request, in whole pages. It holds the window of the last prefix until it is copied.

        SGLang reserves two blocks after the committed tokens, and the next step may already be launched.
        """
        return self._in_pages(min(self.tokens, context + self.block) + self.page - 1 + self.lag + 4 * self.block)

    def _in_pages(self, slots: int) -> int:
        return -(-slots // self.page) * self.page

    def slots(self, context: int, running: int = 1, in_transfer: int | None = None) -> int:
        """Return the slots of all rings and tails.

        A disaggregated server has a ring per row number, padding included.
        """
        rings = running if in_transfer is None else 1 + running + in_transfer
        return rings * self.ring_slots(context) + running * self.tail_slots(context)


def context_window(requested: int | None, drafter: DrafterConfig) -> int | None:
    """Return the context tokens that the drafter reads before the block; None for all of them, or no drafter.

    Layers share one slot table, so full layers read at least as far as the sliding ones.
    """
    sliding = 0 if drafter.sliding_window is None else drafter.sliding_window - 1
    if FULL not in drafter.layer_types:
        return sliding or None
    return None if requested is None else max(requested, sliding)


def draft_window(launch: Launch) -> DraftWindow | None:
    """Return the window that the user set, or that of a drafter whose layers all slide, if it saves memory.

    A window saves memory if its slots per request are fewer than ``TOKENS_PER_REQUEST``. Without the flag, hierarchical
    caches and transfers store the drafter's K/V of all tokens.
    """
    settings, requested = launch.settings, launch.settings.speculative_draft_window_size
    tokens = context_window(requested, launch.drafter)
    if tokens is None:
        return None
    lag = snapshot_grid(launch) if launch.hybrid else settings.page
    caches = not settings.disable_radix_cache and settings.disaggregation_mode != "decode"
    window = DraftWindow(tokens, launch.block, settings.page, lag, caches)
    moves = settings.enable_hierarchical_cache or settings.disaggregation_mode != "null"
    saves = not moves and window.slots(tokens) < TOKENS_PER_REQUEST
    return window if requested is not None or saves else None


@dataclass(frozen=True)
class ServingPlan:
    """Every decision about how our worker serves a pair."""

    files: ModelFiles  # the drafter's
    drafter: DrafterConfig
    block: int  # positions of the widest block, anchor included
    widths: tuple[int, ...] | None  # None for a fixed block, empty for the default widths
    window: DraftWindow | None  # None for the whole context
    replay: bool  # whether there are recurrent states, which a commit replays
    records: int  # positions of a request's replay records
    copies: bool  # whether repeated text is copied
    overlap: bool  # whether the scheduler overlaps steps
    role: Role
    exact: bool = False  # whether a verify is bit-identical to plain decoding
    inexact: tuple[str, ...] = ()  # why not, if requested
    groups: int = 1  # groups of ranks, each with its requests (DP attention)
    own_attention: bool = False  # whether the drafter attends through our backend
    one_forward: bool = False  # whether we replay the drafter's graphs, so that SGLang runs the target's forward only
    verify_attention: bool = True  # whether our kernel attends in a verify under Triton attention
    state_dtype: str | None = None  # dtype of replayed states

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load SGLang's plugins in the process that receives the arguments: SGLang loads none in Ray's actors."""
        from sglang_dflash.upstream.names import load_plugins

        load_plugins()
        self.__dict__.update(state)

    @property
    def drafter_width(self) -> int:
        """Positions that the drafter drafts, anchor included. The rest of a wider block is copied."""
        return min(self.block, self.drafter.block_size or self.block)

    @property
    def has_drafter(self) -> bool:
        return self.drafter.num_layers > 0

    @property
    def served_widths(self) -> tuple[int, ...]:
        return (self.block,) if self.widths is None else widths_for(self.widths, self.block, self.drafter_width)

    def describe(self) -> dict[str, object]:
        """Return the plan as ``/server_info`` and ``sglang-dflash check --json`` show it."""
        return {
            "block_size": self.block,
            "drafted": self.drafter_width,
            "adaptive": self.widths is not None,
            "layers": list(self.drafter.layer_types),
            "causal": list(self.drafter.causal),
            "target_layer_ids": list(self.drafter.target_layer_ids),
            "window": None if self.window is None else self.window.tokens,
            "copied_blocks": self.copies,
            "exact": "; ".join(self.inexact) or self.exact,
            "role": self.role,
        }


def decide(launch: Launch) -> ServingPlan:
    """Make the plan for a launch without an error."""
    settings, ours = launch.settings, launch.has_drafter and launch.draft_backend == OUR_BACKEND
    replay, inexact = replays(launch), reasons_against_exact(launch) if is_requested(launch) else ()
    exact = is_requested(launch) and not inexact
    return ServingPlan(
        files=launch.drafter_files,
        drafter=launch.drafter,
        block=launch.block,
        widths=launch.widths,
        window=draft_window(launch),
        replay=replay,
        records=record_length(launch) if replay else 0,
        copies=launch.widths is not None and settings.disaggregation_mode != "prefill",
        overlap=not (settings.disable_overlap_schedule or resumes_retracted(launch)),
        role=cast(Role, settings.disaggregation_mode),
        exact=exact,
        inexact=inexact,
        groups=settings.groups,
        own_attention=ours,
        one_forward=ours and settings.wants_one_forward,
        verify_attention=not exact and settings.variable(VERIFY_SWITCH) != "0",
        state_dtype=state_dtype(launch) if replay else None,
    )


def backs_up_drafter(launch: Launch) -> bool:
    """Return whether the drafter is backed up: after a resume a trainer writes the target only."""
    settings = launch.settings
    return settings.enable_memory_saver and not settings.enable_weights_cpu_backup and launch.has_drafter


@dataclass(frozen=True)
class Decision:
    """The decision of a launch about DFLASH. Server arguments transport it to every process.

    Attributes:
        plan: of this package's worker; None if SGLang's own serves.
        reason: why SGLang's own worker serves.
        launch: set until SGLang has read the target and the plan is made.
    """

    plan: ServingPlan | None = None
    reason: str | None = None
    launch: Launch | None = None


def attach_decision(server_args: Any, decision: Decision) -> None:
    """Attach a decision to server arguments, which every process of the server receives."""
    server_args._sglang_dflash = decision  # ServerArgs pickles underscore attributes


def decision_of(server_args: Any) -> Decision:
    """Return the decision; an empty one for arguments of another algorithm or without this package."""
    return getattr(server_args, "_sglang_dflash", None) or Decision()


class Current:
    """The worker of this process, for hooks and for classes that SGLang constructs. It exists before they run."""

    worker: "DFlashWorker"


current = Current()
