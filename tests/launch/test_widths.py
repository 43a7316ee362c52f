"""The configuration file: defaults, and refusals by name."""

from __future__ import annotations

import json

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.width_config import read_config, widths_for


@pytest.mark.parametrize(
    "block, drafted, widths",
    [
        (16, None, (1, 2, 4, 8, 12, 16)),
        (10, None, (1, 2, 4, 8, 10)),
        (2, None, (1, 2)),
        (1, None, (1,)),
        # a wider block than the drafter's
        (32, 16, (1, 2, 4, 8, 12, 16, 32)),
        (32, 10, (1, 2, 4, 8, 10, 16, 32)),
        (32, 64, (1, 2, 4, 8, 12, 16, 32)),
    ],
)
def test_default_widths_are_powers_of_two_and_12_the_block_size_and_what_the_drafter_drafts(block, drafted, widths):
    assert widths_for((), block, drafted) == widths


@pytest.mark.parametrize(
    "found, named",
    [
        ({"policy": "adaptive"}, ["policy is unknown", '{"widths"']),
        ({"widths": []}, ["widths", "[]"]),
        ({"widths": [0, 4]}, ["widths is [0, 4]", "numbers from 1"]),
        ({"widths": [True]}, ["widths"]),
        ({"widths": [4.0]}, ["widths"]),
        ({"widths": 4}, ["widths"]),
        (None, ["width.json"]),  # no file
        ({"8": {"candidate_steps": [1, 3]}}, ["the key 8", "batch size", "SGLang's steps", '{"widths"']),
    ],
)
def test_an_unknown_key_or_value_is_refused_by_name(found, named, tmp_path):
    if found is not None:
        (tmp_path / "width.json").write_text(json.dumps(found))
    with pytest.raises(DFlashError) as error:
        read_config(str(tmp_path / "width.json"))
    for text in ("--speculative-adaptive-config", *named):
        assert text in str(error.value)
