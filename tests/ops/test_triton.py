"""The Triton kernels without a GPU: they equal their definitions, fit in registers and are compiled once."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from packaging.version import Version
from triton.knobs import NvidiaTool
from triton.runtime.jit import JITFunction

from sglang_dflash import states
from sglang_dflash.ops import Noise, kernels
from sglang_dflash.ops.kernels.attention import block_attention
from sglang_dflash.ops.kernels.block import accept_block, prepare_block, stage_block, take_drafts, view_rings
from sglang_dflash.ops.kernels.copies import match_copies, take_copies
from sglang_dflash.ops.kernels.model import convolve_block, leading_tokens, likeliest_tokens, norm_rope, walk_candidates
from sglang_dflash.ops.kernels.sampling import penalize_block, seeded_tokens
from sglang_dflash.states.convolution import gdn_convolve
from sglang_dflash.states.kernels import gdn_commit, gdn_verify
from tests.ops import published
from tests.ops.launches import CARDS, SHARED_MEMORY, compiled_for, first_calls, interpreted, tensor
from tests.ops.published import STEPS, RankShapes, launch_ours, rank_shapes
from tests.support.gdn_replay import Blocks

SHAPES = rank_shapes(tp_sizes=(1,))
KERNELS = {
    kernel
    for package in (kernels, states)
    for file in Path(package.__path__[0]).glob("*.py")
    for kernel in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
}
# One of each specialisation of Triton's: 1, a multiple of 16, another number.
WIDTHS = (4, 5, 16)
BATCHES = (1, 3, 16)
MOST_REGISTERS = 128  # of 255: four blocks of 128 threads then share a multiprocessor
# Take more in a step of these widths.
WIDE = {"gdn_verify_kernel": set(STEPS), "gdn_commit_kernel": {"16 of 32", "32"}}
WIDE |= dict.fromkeys(("attend_block_kernel", "reduce_parts_kernel"), set(STEPS))
TILED = {"attend_block_kernel", "reduce_parts_kernel"}  # compiled per tile: width, and few or many requests


def test_kernels_equal_their_definitions_under_the_interpreter() -> None:
    ours = (f"ops/{name}.py" for name in ("cases", "attention_cases", "attention_batches"))
    interpreted(*ours, "states/cases.py", "states/sglang_cases.py")


def test_a_verify_convolves_as_sglangs_kernels() -> None:
    interpreted("states/convolution_cases.py")


def test_nothing_is_compiled_for_another_batch_or_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's keys: nothing is compiled here."""
    compiled = SimpleNamespace
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, *_, **__: compiled(hash=(self.fn.__name__, key)))
    for shapes in SHAPES:
        with compiled_for(90) as launches:
            launch_ours(shapes, bs=1, width=4)
            expected = {launch.key for launch in launches}
            for bs, width in product((1, 16), WIDTHS):
                launch_ours(shapes, bs=bs, width=width)
            expected |= {launch.key for launch in launches if launch.kernel in TILED}
            for width in WIDTHS:
                for bs in BATCHES:
                    launch_ours(shapes, bs=bs, width=width)
                    launch_ours(shapes, bs=bs, width=width, skipped=1)
        others = {(launch.kernel, shapes.name) for launch in launches if launch.key not in expected}
        assert not others


@pytest.mark.parametrize("most", [1, 12, 48, 600])
def test_the_start_compiles_the_kernels_of_every_batch(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's keys, of the dummy steps and of steps of 1 to ``most`` requests."""
    compiled, shapes = SimpleNamespace, SHAPES[0]
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, *_, **__: compiled(hash=(self.fn.__name__, key)))
    monkeypatch.setattr(published, "REQUEST_ROWS", most + 1)
    with compiled_for(90) as launches:
        pool = SimpleNamespace(req_to_token=tensor(most + 1, 64, dtype=torch.int32))
        target = SimpleNamespace(req_to_token_pool=pool, max_running_requests=most)
        first_calls(target, lambda bs, width, *_, **__: launch_ours(shapes, bs=bs, width=width), monkeypatch)
        at_start = {launch.key for launch in launches}
        for bs in {*range(1, min(most, 48) + 1), *range(511, 514), most}:
            if bs <= most:
                launch_ours(shapes, bs=bs, width=16)
    late = {(launch.kernel, launch.key) for launch in launches if launch.key not in at_start}
    assert at_start and not late


# FlashInfer makes Triton assemble Blackwell's kernels with the first ptxas on PATH of release 13 or later.
ON_PATH = NvidiaTool.from_path("ptxas")
OTHER = [ON_PATH.path] if ON_PATH and Version(ON_PATH.version) >= Version("13") else []


ONE_STEP, EVERY_STEP = [*product(SHAPES, ["16"])], [*product(rank_shapes(tp_sizes=(1, 8)), STEPS)]
SLOW = [*product(SHARED_MEMORY, [None], [EVERY_STEP]), *product(sorted(set(CARDS) - {90}), OTHER, [ONE_STEP])]


@pytest.mark.parametrize(
    ("capability", "ptxas", "turns"),
    [*product(CARDS, [None], [ONE_STEP]), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_kernels_fit_in_registers_and_grids_at_the_published_shapes(
    capability: int, ptxas: str | None, turns: list[tuple[RankShapes, str]]
) -> None:
    """Of one rank the usual step; in ``make rehearse`` of eight ranks too, and every step."""
    for shapes, step in turns:
        width, block = STEPS[step]
        with compiled_for(capability, ptxas) as launches:
            launch_ours(shapes, bs=512, width=width, block=block)
        assert {launch.kernel for launch in launches} == KERNELS
        for launch in launches:
            usage = launch.usage
            assert usage.stack == 0 and usage.shared <= SHARED_MEMORY[capability], (launch.kernel, usage)
            most = 255 if step in WIDE.get(launch.kernel, ()) else MOST_REGISTERS
            assert usage.registers <= most, (launch.kernel, usage)
            assert all(size <= 65_535 for size in launch.grid[1:]), launch


@pytest.mark.parametrize(
    ("capability", "dtype"), [(86, torch.bfloat16), (90, torch.float16), *product((86, 90, 120), [torch.float32])]
)
def test_a_replay_does_not_spill_in_other_dtypes_and_on_older_gpus(capability: int, dtype: torch.dtype) -> None:
    """They did, with one warp of 168 registers."""
    for width in (16, 32):
        with compiled_for(capability) as launches:
            published._gdn_replay(SHAPES[0], 16, width, width, tensor, dtype)
        assert {launch.kernel: launch.usage.stack for launch in launches} == {
            "gdn_verify_kernel": 0,
            "gdn_commit_kernel": 0,
        }


EVERY_OTHER = torch.zeros(8, dtype=torch.int64)[::2]
TRIPLES = torch.zeros(4, 4, 2, dtype=torch.int64)
DENSE, TABLE, FOUND = EVERY_OTHER.clone(), torch.zeros(4, 8), torch.zeros(4, 2)
BLOCKS = Blocks(4, 1)
HEADS, INTS = (torch.zeros(2, 1, 16),) * 3, torch.zeros(2, 8, dtype=torch.int32)


def convolve(rows: torch.Tensor = DENSE, steps: int = 2) -> None:
    states, windows, slots = torch.zeros(4, 8, 3), torch.zeros(4, steps, 8, 3), DENSE[:2]
    gdn_convolve(TABLE, TABLE, TABLE, TABLE.new_zeros(8, 4), None, states, slots, windows, rows, width=2)


COPIES, TAKEN = {"longest": 4, "bound": 7}, {"least": 4, "margin": 4.0}
STRIDED: dict[str, Callable[[], object]] = {
    "prepare_block_kernel": lambda: prepare_block(DENSE, EVERY_OTHER, DENSE, TABLE, width=2, mask_token_id=0),
    "accept_block_kernel": lambda: accept_block(TABLE, TABLE, EVERY_OTHER),
    "take_drafts_kernel": lambda: take_drafts(DENSE[:, None], DENSE[:, None], EVERY_OTHER, DENSE[0]),
    "stage_block_kernel": lambda: stage_block(TABLE, DENSE, EVERY_OTHER, DENSE, TABLE, DENSE, DENSE),
    "view_rings_kernel": lambda: view_rings(
        *(TABLE, DENSE, EVERY_OTHER, DENSE, DENSE), first=1, size=4, window=2, page=1
    ),
    "norm_rope_kernel": lambda: norm_rope(TABLE[None, :, None], TABLE[:1, None], 1e-6, EVERY_OTHER, TABLE),
    "penalize_block_kernel": lambda: penalize_block(TABLE[:, None], DENSE[:, None], TABLE, EVERY_OTHER, TABLE),
    "gdn_convolve_kernel": lambda: convolve(rows=EVERY_OTHER),
    "gdn_verify_kernel": lambda: BLOCKS.verify(gdn_verify, BLOCKS.records, slots=EVERY_OTHER),
    "gdn_commit_kernel": lambda: gdn_commit(BLOCKS.states, BLOCKS.records, DENSE, DENSE, EVERY_OTHER),
    "match_copies_kernel": lambda: match_copies(TABLE, FOUND, DENSE, DENSE, TABLE, EVERY_OTHER, **COPIES),
    "take_copies_kernel": lambda: take_copies(TABLE, TABLE, TABLE, FOUND, EVERY_OTHER, DENSE, **TAKEN),
    "attend_block_kernel": lambda: block_attention(*HEADS, INTS, EVERY_OTHER[:2], DENSE[:2], scale=1.0),
    "reduce_parts_kernel": lambda: block_attention(*HEADS, INTS, DENSE[:2], EVERY_OTHER[:2], scale=1.0),
    "convolve_block_kernel": lambda: convolve_block(EVERY_OTHER[:, None], TABLE, TABLE[:, None], width=2),
    "walk_candidates_kernel": lambda: walk_candidates(TRIPLES[..., ::2], TABLE, DENSE, DENSE),
    "tile_largest_kernel": lambda: leading_tokens(EVERY_OTHER[None], 1),
    "leading_tokens_kernel": lambda: leading_tokens(TABLE, 1, Noise(*(EVERY_OTHER,) * 5)),
    "tile_stats_kernel": lambda: seeded_tokens(TABLE, EVERY_OTHER, None, DENSE, DENSE),
    "limits_kernel": lambda: seeded_tokens(TABLE, DENSE, (DENSE, EVERY_OTHER, DENSE), DENSE, DENSE),
    "race_kernel": lambda: seeded_tokens(TABLE, DENSE, None, EVERY_OTHER, DENSE),
}


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_a_vector_with_a_stride_is_refused(kernel: str) -> None:
    """Kernels index it without strides."""
    with pytest.raises(AssertionError, match="2,"):
        STRIDED[kernel]()


# One row or column less than the launcher writes, of every memory that its caller allocates.
SHORT: dict[str, Callable[[], object]] = {
    "staged hidden states": lambda: stage_block(TABLE, DENSE, DENSE, DENSE[:2], TABLE[:3], DENSE, DENSE),
    "staged positions": lambda: stage_block(TABLE, DENSE, DENSE, DENSE[:2], TABLE, DENSE[:3], DENSE),
    "staged slots": lambda: stage_block(TABLE, DENSE, DENSE, DENSE[:2], TABLE, DENSE, DENSE[:3]),
    "matches": lambda: match_copies(TABLE, FOUND[:3], DENSE, DENSE, TABLE, DENSE, **COPIES),
    "takes": lambda: take_copies(TABLE, TABLE, TABLE, FOUND[:3], DENSE, DENSE, **TAKEN),
    "rings": lambda: view_rings(TABLE[:3], DENSE, DENSE, DENSE, DENSE, first=1, size=4, window=2, page=1),
    "slots of a ring": lambda: view_rings(TABLE, DENSE, DENSE, DENSE, DENSE, first=1, size=9, window=2, page=1),
    "noise of a request": lambda: walk_candidates(TRIPLES, TABLE, DENSE, DENSE, (DENSE[:3],) * 5),
    "noise of a draft": lambda: likeliest_tokens(TABLE[:, None], 1, DENSE, Noise(*(DENSE[:3],) * 5)),
    "windows of a convolution": lambda: convolve(steps=1),
    "rows of a convolution": lambda: convolve(rows=DENSE[:1]),
}


@pytest.mark.parametrize("destination", SHORT)
def test_a_destination_that_is_one_row_short_is_refused(destination: str) -> None:
    """A kernel has no bound: it would write to other tensors' memory."""
    with pytest.raises(AssertionError):
        SHORT[destination]()
