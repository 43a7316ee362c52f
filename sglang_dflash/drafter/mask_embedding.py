"""The embedding that a drafter was trained to see in place of the target's row for the mask token."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.errors import DFlashError

FILE = "mask_embedding.pt"


def load_mask_embedding(file: Path | None, config: DrafterConfig) -> Tensor | None:
    """Read ``mask_embedding.pt``, which some trainers of DFlash drafters write beside the weights.

    The target's own row is often an unused one, which nothing ever trained.

    Args:
        file: where it is; None if the checkpoint has none.
        config: the drafter's.

    Returns:
        [H], in the dtype of the file; None if the checkpoint has none.

    Raises:
        DFlashError: the file cannot be read, or was made for something else than ``config``.
    """
    if file is None:
        return None
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        embedding, token_id = saved["embedding"], int(saved["mask_token_id"])
        per_position = bool(saved.get("per_position"))
        shape = tuple(embedding.shape)
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(file, f"cannot be read ({error!r})", "a dict of embedding and mask_token_id") from None
    if per_position:
        raise _unusable(file, "has one embedding per position of the block", "one for all mask tokens")
    if token_id != config.mask_token_id:
        expected = f"mask_token_id {config.mask_token_id}, as in config.json"
        raise _unusable(file, f"was trained with mask_token_id {token_id}", expected)
    if shape != (config.hidden_size,):
        raise _unusable(file, f"holds a tensor of shape {list(shape)}", f"[{config.hidden_size}], the hidden size")
    return embedding


def _unusable(file: Path, problem: str, expected: str) -> DFlashError:
    return DFlashError(f"{file} {problem}", expected=expected, remedy="download the drafter again, or ask its authors")
