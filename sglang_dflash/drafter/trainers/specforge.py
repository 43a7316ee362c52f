"""SpecForge: plain for DFlash. Its other kinds have classes of their own, which SGLang knows by other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.keys import architecture
from sglang_dflash.errors import DFlashError


def plain(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plain form, if SpecForge wrote ``config``.

    Raises:
        DFlashError: a DSpark drafter, which SGLang serves by another algorithm and from other keys.
    """
    name = architecture(config)
    if name == "DSparkDraftModel":
        raise DFlashError(
            "the drafter is of the kind DSpark (Markov head), as SpecForge writes it",
            expected="a plain DFlash drafter",
            remedy="convert it with SpecForge's scripts/gates/normalize_dflash_export.py and serve it with "
            "--speculative-algorithm DSPARK",
        )
    return {**config, "architectures": ["DFlashDraftModel"]} if name == "DominoDraftModel" else config
