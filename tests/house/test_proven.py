"""Every model type that this package calls proven has a row in the test that it names, which serves such a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("sglang")

import transformers

from sglang_dflash.drafter.formats import text_config
from sglang_dflash.launch.which_worker import PROVEN
from sglang_dflash_lab.pairs import target_path
from tests.families.test_families import EACH
from tests.serving.matrix import MATRIX
from tests.serving.test_images import _SHAPES, OTHERWISE
from tests.support.cards import FOLDER, NAMES
from tests.support.files import load_config

pytestmark = pytest.mark.sglang


def types(config: Mapping[str, Any]) -> set[str]:
    """Return the model types of a target and of its text part, as a configuration without that part states them."""
    return {config["model_type"], text_config(config)["model_type"]}


STARTED = {
    "tests/families/test_families.py": [{cell.target.split()[0]} for cell in EACH],  # asserted when it is built
    "tests/serving/test_cards.py": [types(load_config(FOLDER / name / "target")) for name in NAMES],
    "tests/serving/test_dflash_equality.py": [types(load_config(target_path(cell.pair))) for cell in MATRIX],
    "tests/serving/test_images.py": [
        types(getattr(transformers, f"{_SHAPES[name][0]}Config")().to_dict()) for name, *_ in OTHERWISE.values()
    ],
}
TESTS = {name: test for proof in PROVEN.values() for name, test in proof.tests.items()}


@pytest.mark.parametrize("name", TESTS)
def test_a_proven_type_is_started_by_its_test(name: str) -> None:
    assert any(name in found for found in STARTED[TESTS[name]])
