"""A drafter that brings code: SGLang would run it under ``--trust-remote-code``, a flag meant for the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.errors import DFlashError

_KEY = "AutoConfig"  # the only entry of auto_map that SGLang asks transformers for; weights load into our own classes


def check_code(config: Mapping[str, Any], trusted: bool) -> str:
    """What is found of code in a drafter.

    Args:
        config: its ``config.json``.
        trusted: ``--trust-remote-code``.

    Raises:
        DFlashError: some would run.
    """
    named = config.get("auto_map")
    if not trusted or not isinstance(named, Mapping) or _KEY not in named:
        return "none of its own runs"
    raise DFlashError(
        f"--trust-remote-code would run the drafter's own code ({_KEY} {named[_KEY]!r} in its config.json)",
        expected="a drafter without code: sglang-dflash has its model, and nothing of the drafter needs to run",
        remedy=f"take {_KEY} out of auto_map in the drafter's config.json, or leave --trust-remote-code out",
    )
