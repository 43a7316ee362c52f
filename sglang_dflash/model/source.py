"""Where the server's drafter checkpoint is, and its configuration as published."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from sglang_dflash.config import DrafterConfig, load_config
from sglang_dflash.upstream import get_spec


def published_config(path: str, revision: str | None) -> dict[str, Any]:
    """``config.json`` of a drafter, from a local directory or the Hugging Face hub.

    Raises:
        DFlashError: the file is missing or not JSON.
    """
    if Path(path).is_dir():
        return load_config(path)
    from huggingface_hub import hf_hub_download

    return load_config(Path(hf_hub_download(path, "config.json", revision=revision)).parent)


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
