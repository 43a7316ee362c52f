"""Where the server's drafter checkpoint is, and its files as published."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig, load_config
from sglang_dflash.drafter.mask_embedding import FILE, load_mask_embedding
from sglang_dflash.upstream import get_spec


def published_file(path: str, revision: str | None, name: str) -> Path | None:
    """A file of a drafter, from a local directory or the Hugging Face hub; None where the drafter has none such."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(path, name, revision=revision))
    except EntryNotFoundError:
        return None


def published_config(path: str, revision: str | None) -> dict[str, Any]:
    """``config.json`` of a drafter.

    Raises:
        DFlashError: the file is missing or not JSON.
    """
    file = published_file(path, revision, "config.json")
    return load_config(path if file is None else file.parent)


def drafter_config() -> DrafterConfig:
    """Configuration of the drafter that this server was started with.

    Raises:
        DFlashError: the configuration is unusable, or of another kind of drafter.
    """
    spec = get_spec()
    return _parsed(spec.speculative_draft_model_path, spec.speculative_draft_model_revision)


@cache
def _parsed(path: str, revision: str | None) -> DrafterConfig:
    return DrafterConfig.from_dict(published_config(path, revision))


def mask_embedding() -> Tensor | None:
    """The drafter's own embedding of the mask token, [H]; None where the target's serves.

    Raises:
        DFlashError: the drafter has one that cannot be used.
    """
    spec = get_spec()
    file = published_file(spec.speculative_draft_model_path, spec.speculative_draft_model_revision, FILE)
    return load_mask_embedding(file, drafter_config())
