"""A drafter's ``config.json``, on its own and beside a target's."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from sglang_dflash.check.options import parse
from sglang_dflash.check.pair import check_pair
from sglang_dflash.check.preflight import preflight
from sglang_dflash.drafter.config import DrafterConfig, load_config, quantization
from sglang_dflash.drafter.kinds import kind_left_to_builtin
from sglang_dflash.drafter.tensors import expected_shapes
from sglang_dflash.memory.machine import CPU, GPUS
from tests.fuzz.part import Part
from tests.fuzz.values import DEEP_TEXT, damage, dumped, pick, spoil
from tests.support.broken_pairs import Broken, write_pair
from tests.support.configs import DRAFTER, TARGET

_FIXTURES = Path(__file__).parents[1] / "fixtures"
DRAFTERS = [DRAFTER, *(json.loads(file.read_text()) for file in sorted(_FIXTURES.glob("cards/*/drafter/config.json")))]
TARGETS = [TARGET, *(json.loads(file.read_text()) for file in sorted(_FIXTURES.glob("cards/*/target/config.json")))]
OF_TRAINERS = [json.loads(file.read_text()) for file in sorted(_FIXTURES.glob("trainers/*/config.json"))]
KEYS = sorted(
    {key for config in DRAFTERS for key in (*config, *config.get("dflash_config", {}))}
    | {"text_config", "dflash_config", "quantization_config", "rope_parameters", "rope_scaling", "rope_dim", "dtype"}
    | {"layer_types", "sliding_window", "is_causal", "causal", "use_swa", "projector_type", "selector_rank"}
)
TARGET_KEYS = sorted({key for config in TARGETS for key in (*config, *config.get("text_config", {}))})
_BYTES = [b"", b"\xff\xfe{}", b'{"a":' * 5000, b"1" * 5000, b'{"a": 1' + b"0" * 5000 + b"}", DEEP_TEXT.encode()]


def text(random: Random, values: list[Any]) -> bytes:
    """A JSON file: a spoilt configuration, a damaged one, or anything."""
    kind = random.random()
    if kind < 0.3:
        return dumped(spoil(random, random.choice(DRAFTERS), KEYS, values))
    if kind < 0.7:
        return damage(random, dumped(DRAFTER))
    if kind < 0.9:
        return dumped(pick(random, values))
    return random.choice((*_BYTES, random.randbytes(random.randrange(64))))


def config(random: Random, values: list[Any]) -> Any:
    if random.random() < 0.05:
        return {random.choice(KEYS): pick(random, values) for _ in range(random.randrange(9))}
    return spoil(random, random.choice(DRAFTERS + OF_TRAINERS), KEYS, values)


def pair(random: Random, values: list[Any]) -> tuple[Any, Any]:
    """A pair that fits but for edits; with edits of one side it gets furthest."""
    index, side = random.choice((0, random.randrange(len(TARGETS)))), random.random()
    drafter, target = DRAFTERS[index], TARGETS[index]
    if side < 0.6:
        drafter = spoil(random, drafter, KEYS, values)
    if side > 0.4:
        target = spoil(random, target, TARGET_KEYS, values)
    return drafter, target


def parts(folder: Path) -> list[Part]:
    write_pair(folder, Broken("", ""))
    own, its_target = folder / "drafter", folder / "target"
    args, _, _ = parse(["--dtype", "bfloat16"], target=str(its_target), drafter=str(own))

    def read(found: dict[str, Any]) -> None:
        kind_left_to_builtin(found)
        quantization(found)
        parsed = DrafterConfig.from_dict(found)
        expected_shapes(parsed)
        list(check_pair(parsed, TARGET, args))

    def write_both(configs: tuple[Any, Any]) -> None:
        for path, content in zip((own, its_target), configs, strict=True):
            (path / "config.json").write_bytes(dumped(content))

    def write(data: bytes) -> None:
        (own / "config.json").write_bytes(data)

    def check(_: Any) -> None:
        for machine in (CPU, GPUS["b200"]):
            show(preflight(args, machine))

    return [
        Part("drafter's config.json", config, read, 28_000),
        Part("config.json as bytes", text, lambda _: load_config(own), 8_000, write, folder),
        Part("both configurations, whole check", pair, check, 5_000, write_both, folder),
    ]


def show(report: Any) -> None:
    """Everything that a terminal or a log is given."""
    for finding in report.findings:
        for part in (finding.about, finding.value, finding.expected, finding.remedy):
            assert isinstance(part, str) and part.isprintable(), ascii(part)[:200]
