"""What exact mode takes for granted of SGLang's kernel as Triton compiles it, for GPUs that are not here.

A verify must launch the very kernel of plain decoding. A commit launches another compilation, with the heads of all
layers side by side, whose arithmetic must be the same. A bump of SGLang or Triton fails here, not at a user.
"""

from __future__ import annotations

import collections
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from triton import knobs

from sglang_dflash.drafter.config import load_config, text_config
from sglang_dflash.states import stepped
from sglang_dflash.states.reference import Records
from tests.ops.launches import Launch, compiled_for, tensor
from tests.support.cards import FOLDER

pytestmark = pytest.mark.sglang

BF16, BS, WIDTH, LAYERS = torch.bfloat16, 4, 16, 3
FLOATS = re.compile(r"F(ADD|MUL|FMA)\d?|MUFU|SHFL|F2F|F2FP")
PAIRS = ("Qwen3.5-27B", "Qwen3.6-35B-A3B")


def sizes(pair: str) -> tuple[int, int, int, int]:
    target = text_config(load_config(FOLDER / pair / "target"))
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    heads, value_heads, k, v = (int(target[f"linear_{name}"]) for name in names)
    return heads, value_heads, k, v


def decode(H: int, HV: int, K: int, V: int, state: torch.dtype) -> None:
    """As SGLang's ``TritonGDNKernel.packed_decode`` launches it."""
    stepped.fused_recurrent_gated_delta_rule_packed_decode(
        tensor(BS, 2 * H * K + HV * V, dtype=BF16), tensor(BS, HV, dtype=BF16), tensor(BS, HV, dtype=BF16),
        tensor(HV, dtype=torch.float32), tensor(HV, dtype=BF16), K**-0.5, tensor(64, HV, V, K, dtype=state),
        tensor(BS, 1, HV, V, dtype=BF16), tensor(BS, dtype=torch.int32), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def verify(H: int, HV: int, K: int, V: int, state: torch.dtype) -> None:
    mixed = tensor(BS * WIDTH, 2 * H * K + HV * V, dtype=BF16)
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    gates = (tensor(BS * WIDTH, HV, dtype=BF16) for _ in "ab")
    stepped.step_verify(
        *(q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), *gates),
        tensor(HV, dtype=torch.float32), tensor(HV, dtype=BF16), tensor(64, HV, V, K, dtype=state),
        tensor(BS, dtype=torch.int32), width=WIDTH, scale=K**-0.5,
    )  # fmt: skip


def commit(H: int, HV: int, K: int, V: int, state: torch.dtype) -> None:
    rings = ((HV, 16, V, BF16), (H, 16, K, BF16), (HV, 16, torch.float32), (HV, 16, V, BF16), (H, 16, K, BF16))
    records = Records(*(tensor(LAYERS, 9, *shape, dtype=dtype) for *shape, dtype in rings))  # type: ignore[misc]
    stepped.step_commit(
        tensor(LAYERS, 64, HV, V, K, dtype=state), records,
        [(tensor(HV, dtype=torch.float32), tensor(HV, dtype=BF16))] * LAYERS,
        tensor(BS), tensor(BS, dtype=torch.int32), tensor(BS, dtype=torch.int32), width=WIDTH,
    )  # fmt: skip


def only_kernel(launches: list[Launch]) -> Any:
    """The compilation that all of these launches share."""
    assert len({launch.key for launch in launches}) == 1, launches
    return launches[0].compiled


def arithmetic(compiled: Any, folder: Path) -> collections.Counter[str]:
    """Float instructions and exchanges between lanes, by kind, of the whole kernel."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", listing)
    return collections.Counter(name for name in found if FLOATS.fullmatch(name))


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("state", [torch.float32, BF16])
def test_steps_run_plain_decodings_arithmetic(pair: str, state: torch.dtype, capability: int, tmp_path: Path) -> None:
    found = {}
    for call in (decode, verify, commit):
        with compiled_for(capability) as launches:
            call(*sizes(pair), state)
        assert len(launches) == (1 if call is decode else WIDTH)
        found[call] = only_kernel(launches)
    assert found[verify].hash == found[decode].hash
    layouts = [re.findall(r"#\w+ = #ttg\.\w+<.*>", found[call].asm["ttgir"]) for call in (decode, commit)]
    assert layouts[0] and layouts[0] == layouts[1]
    counts = [arithmetic(found[call], tmp_path) for call in (decode, commit)]
    assert counts[0]["FADD"] and counts[0] == counts[1]
