"""The plan of the server that this process belongs to; read everywhere, made in :mod:`.decide`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sglang_dflash.drafter.checkpoint import ModelFiles
    from sglang_dflash.drafter.config import DrafterConfig
    from sglang_dflash.errors import DFlashError
    from sglang_dflash.plan.memory import MemoryTable
    from sglang_dflash.plan.window import DraftWindow
    from sglang_dflash.width.config import WidthConfig

Role = Literal["null", "prefill", "decode"]  # SGLang's --disaggregation-mode


@dataclass(frozen=True)
class ServingPlan:
    """Every decision about how our worker serves a pair.

    Attributes:
        files, drafter: where the drafter's files are, and its parsed configuration.
        block: positions of the widest block, anchor included.
        widths: the adaptive widths; None for a fixed block.
        window: how far back the drafter reads; None for the whole context.
        replay: whether recurrent states are replayed instead of kept for each draft token; False for a dense target.
        records: positions of a request's replay records.
        copies: whether blocks are copied from what a request repeats.
        overlap: whether the scheduler may overlap with the forward pass.
        role: in a disaggregated pair of servers.
        memory: expected memory of one rank; None where it could not be computed, and in the processes that a server
            starts, which know what was allocated.
        unsized: why it could not be computed.
    """

    files: ModelFiles
    drafter: DrafterConfig
    block: int
    widths: WidthConfig | None
    window: DraftWindow | None
    replay: bool
    records: int
    copies: bool
    overlap: bool
    role: Role
    memory: MemoryTable | None = None
    unsized: DFlashError | None = None

    @property
    def drafted(self) -> int:
        """Positions that the drafter drafts, anchor included; what a wider block has beyond them is copied."""
        return min(self.block, self.drafter.block_size or self.block)

    def describe(self) -> dict[str, object]:
        """The plan as ``/server_info`` and ``sglang-dflash check --json`` show it."""
        return {
            "block_size": self.block,
            "drafted": self.drafted,
            "adaptive": self.widths is not None,
            "strategy": f"chain of argmax drafts, {'adaptive' if self.widths else 'fixed'} width up to {self.block}",
            "layers": list(self.drafter.layer_types),
            "causal": list(self.drafter.causal),
            "target_layer_ids": list(self.drafter.target_layer_ids),
            "window": None if self.window is None else self.window.tokens,
            "states": "replayed" if self.replay else "kept",
            "copied_blocks": self.copies,
            "role": self.role,
        }


# The plan that this process serves: set once SGLang has asked which worker class to construct, None where SGLang's own
# worker serves. Hooks read ``serving.plan`` on every call.
plan: ServingPlan | None = None


def the_plan() -> ServingPlan:
    """The plan, in code that only runs while our worker serves."""
    assert plan is not None, "our worker does not serve in this process"
    return plan
