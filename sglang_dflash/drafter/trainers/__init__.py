"""Drafters of other trainers, in the plain form: the keys that z-lab publishes, which the rest of the package reads.

Each module knows one trainer: what marks its files, and what its keys are in the plain form. What cannot be served as
it was trained is refused here, before any weight is loaded. Tensors need no renaming: all of them use the plain names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.trainers import automodel, modelopt, specforge, speculators


def plain_form(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same drafter as z-lab would have written it; ``config`` itself if it is plain, or no drafter at all.

    Raises:
        DFlashError: a trainer's form that cannot be served.
    """
    if speculators.wrote(config):
        return speculators.plain(config)
    return modelopt.plain(specforge.plain(automodel.plain(config)))
