"""Memory outside the static share: sampling at its peak, and what attention backends set aside for CUDA graphs.

The formulas are those of ``init_cuda_graph_state`` in SGLang 0.5.23's attention backends, for a chain of drafts. Every
width has a set of graphs with buffers of its own: the target's, and for blocks that are drafted whole the drafter's.
Activations and the graphs themselves come on top; nothing tells their size before they run.
"""

from __future__ import annotations

from dataclasses import dataclass

SPLITS = 8  # SGLang's --triton-attention-num-kv-splits
SAMPLED_AT_ONCE = 1 << 25  # probabilities that seeded draws filter at once (worker/sampling/seeded.py)
FLOOR = 2 << 30  # bytes that stay free for what a prefill needs while it runs
_FILTERS = 4  # copies of them that top-k, top-p and min-p keep at their peak


@dataclass(frozen=True)
class Reader:
    """A model whose attention is captured.

    Attributes:
        backend: SGLang's name of its attention backend.
        heads, head_dim: attention heads on one rank.
        window: tokens that sliding layers see; None without any.
        drafts: positions that it drafts at most, anchor included; 0 for the target.
    """

    backend: str
    heads: int
    head_dim: int
    window: int | None = None
    drafts: int = 0


@dataclass(frozen=True)
class Graphs:
    """What the graphs of a server are sized by.

    Attributes:
        batch: requests of the largest graph.
        widths: of a block, each with a set of graphs.
        context: tokens of the longest request.
        page: tokens of a K/V page.
    """

    batch: int
    widths: tuple[int, ...]
    context: int
    page: int


def buffers(graphs: Graphs, target: Reader, drafter: Reader) -> int:
    """Bytes of the buffers of all sets."""
    return sum(
        buffers_of(reader, graphs, width)
        for width in graphs.widths
        for reader in (target, drafter)
        if not reader.drafts or 1 < width <= reader.drafts  # nothing to draft, or no more than with other graphs
    )


def buffers_of(reader: Reader, graphs: Graphs, width: int) -> int:
    """Bytes of one set of one model; 0 for a backend that is not known."""
    rows, context, wrappers = graphs.batch * width, graphs.context, 1 if reader.window is None else 2
    table = graphs.batch * -(-context // graphs.page) * 4
    match reader.backend:
        case "fa3" | "fa4":  # plain decode, draft decode, verify, draft extension; and the pages' first positions
            return 4 * table + 3 * -(-context // graphs.page) * 8
        case "trtllm_mha":  # a bidirectional block is read as requests of their own
            return (4 + (width if reader.drafts else 0)) * table
        case "flashinfer":  # a slot number for each row and token, and a mask
            return rows * context * (4 * wrappers + 1)
        case "triton":  # the same with 64-bit numbers, and partial results of each split
            mask = 0 if reader.drafts else rows * (context + width)
            partial = rows * reader.heads * SPLITS * (reader.head_dim + 1) * 4
            return rows * (context + (reader.window or 0)) * 8 + mask + partial
    return 0


def sampling(rows: int, vocab: int) -> int:
    """Bytes at the peak of a step that samples: the logits in float32, and beside them either their softmax or the
    filters' copies of some rows."""
    logits = rows * vocab
    return 4 * (logits + max(logits, _FILTERS * min(logits, SAMPLED_AT_ONCE)))


def default_backend(major: int | None) -> str:
    """The attention backend that suits a GPU.

    Args:
        major: of its CUDA compute capability; None if unknown.
    """
    return {8: "fa3", 9: "fa3", 10: "trtllm_mha", 12: "trtllm_mha"}.get(major or 0, "flashinfer")


@dataclass(frozen=True)
class Outside:
    """Device memory that is not static, bytes.

    Attributes:
        sampling: at its peak.
        buffers: of the attention backends, for CUDA graphs.
        sets: of graphs, one for each width.
        left: of the device for activations and the graphs themselves; negative if the others do not fit.
    """

    sampling: int
    buffers: int
    sets: int
    left: int
