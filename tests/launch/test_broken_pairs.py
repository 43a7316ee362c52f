"""The server refuses every broken pair while it resolves its flags, in the words that ``check`` uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.broken_pairs import BROKEN, Broken, write_pair
from tests.support.configs import write_model
from tests.support.parse_commands import outcomes

pytestmark = pytest.mark.sglang

pytest.importorskip("sglang")

NO_DRAFTER = ("--model-path", "TARGET", "--speculative-algorithm", "DFLASH")

FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
DRAFTER_INT8 = ("--speculative-draft-model-quantization", "w8a8_int8")
LOSSY = ("--speculative-accept-threshold-single", "0.5")
# What a GPU serves and the CPU platform does not.
NOT_ON_A_CPU = [
    Broken("fp8 target", "fp8 quantisation on a CPU", target=FP8),
    Broken("int8 target", "w8a8_int8 quantisation on a CPU", flags=("--quantization", "w8a8_int8")),
    Broken("fp8 KV cache", "--kv-cache-dtype fp8_e4m3 on a CPU", flags=("--kv-cache-dtype", "fp8_e4m3")),
    Broken("drafter quantised by flag", "(w8a8_int8): no CPU serves it", flags=DRAFTER_INT8),
    Broken("quantised drafter", "(fp8): no CPU serves it", drafter=FP8),
    Broken("what only SGLang's worker serves", "not lossless", flags=LOSSY),
]


# Flags without a drafter, and the refusal.
COPIES_ALONE = {
    (): None,
    ("--speculative-num-draft-tokens", "16"): None,
    ("--speculative-draft-window-size", "64"): "without --speculative-draft-model-path",
    ("--disaggregation-mode", "prefill"): "prefill without a drafter",
    LOSSY: "needs a drafter",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder = tmp_path_factory.mktemp("pairs")
    commands = {}
    for index, broken in enumerate([*BROKEN, *NOT_ON_A_CPU, Broken("fits", "")]):
        pair = folder / str(index)
        write_pair(pair, broken)
        drafter = ("--speculative-draft-model-path", str(pair / "drafter"))
        commands[broken.name] = ["--model-path", str(pair / "target"), *NO_DRAFTER[2:], *drafter, *broken.flags]
    for flags in COPIES_ALONE:
        commands[" ".join(flags)] = ["--model-path", str(pair / "target"), *NO_DRAFTER[2:], *flags]
    commands["other names"] = ["--model-path", str(gpt2(folder / "gpt2"))]
    found = outcomes([*commands.values()], resolve=True)
    return {name: each.get("error") for name, each in zip(commands, found, strict=True)}


def gpt2(folder: Path) -> Path:
    """A target that names the parts of its shape in its own way."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 512, "vocab_size": 1024}
    return write_model(folder, {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **shape})


@pytest.mark.parametrize("name", ["fits", "other names"])
def test_a_pair_that_fits_is_not_refused(name: str, refusals: dict[str, str | None]) -> None:
    assert refusals[name] is None


@pytest.mark.parametrize("broken", [*BROKEN, *NOT_ON_A_CPU], ids=lambda broken: broken.name)
def test_a_broken_pair_is_refused(broken: Broken, refusals: dict[str, str | None]) -> None:
    refusal = refusals[broken.name]
    assert refusal is not None, "the server would have started"
    assert "DFlashError" in refusal
    assert broken.names in refusal
    assert "Fix: " in refusal


@pytest.mark.parametrize("flags", COPIES_ALONE, ids=" ".join)
def test_copies_need_no_drafter_and_what_needs_one_is_refused(
    flags: tuple[str, ...], refusals: dict[str, str | None]
) -> None:
    expected, found = COPIES_ALONE[flags], refusals[" ".join(flags)]
    assert found is None if expected is None else expected in str(found)
