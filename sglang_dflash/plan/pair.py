"""The two models of a pair, as their files describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.reading import parse_object


@dataclass(frozen=True)
class Pair:
    """Target and drafter.

    Attributes:
        target, drafter: the target's ``config.json`` and the drafter's parsed one, ``--json-model-override-args``
            applied to both, as SGLang does.
        target_files, drafter_files: where the other small files and the headers are read from.
    """

    target: Mapping[str, Any]
    drafter: DrafterConfig
    target_files: ModelFiles
    drafter_files: ModelFiles


def drafter_files(args: Any) -> ModelFiles:
    """The drafter that server arguments name."""
    return ModelFiles(args.speculative_draft_model_path, args.speculative_draft_model_revision)


def read_pair(args: Any) -> Pair:
    """The pair that server arguments name.

    Raises:
        DFlashError: a configuration cannot be read, or is none of a plain DFlash drafter.
    """
    own, targets = drafter_files(args), ModelFiles(args.model_path, args.revision)
    overrides = parse_object(args.json_model_override_args, "--json-model-override-args")
    drafter = DrafterConfig.from_dict({**own.config, **overrides})
    return Pair({**targets.config, **overrides}, drafter, targets, own)
