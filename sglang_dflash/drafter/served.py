"""The drafter of the server that this process belongs to, and whether our worker serves it here."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.mask_embedding import FILE, load_mask_embedding
from sglang_dflash.upstream import get_spec

_our_worker_serves = False


def our_worker_serves() -> bool:
    """Whether this process runs our worker: known once SGLang has asked which worker class to construct."""
    return _our_worker_serves


def note_our_worker(serves: bool) -> None:
    """Note which worker class SGLang was given (:func:`sglang_dflash.hooks.takeover.choose_worker`)."""
    global _our_worker_serves
    _our_worker_serves = serves


def drafter_config() -> DrafterConfig:
    """Configuration of the drafter that this server was started with.

    Raises:
        DFlashError: the configuration is unusable, or of another kind of drafter.
    """
    return _parsed(_files())


@cache
def _parsed(files: ModelFiles) -> DrafterConfig:
    return DrafterConfig.from_dict(files.config)


def mask_embedding() -> Tensor | None:
    """The drafter's own embedding of the mask token, [H]; None if the target's serves.

    Raises:
        DFlashError: the drafter has one that cannot be used.
    """
    return load_mask_embedding(_files().path(FILE), drafter_config())


def _files() -> ModelFiles:
    spec = get_spec()
    return ModelFiles(spec.speculative_draft_model_path, spec.speculative_draft_model_revision)
