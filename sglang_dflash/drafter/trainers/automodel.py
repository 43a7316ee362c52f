"""NVIDIA's NeMo AutoModel: plain but for the names of its classes, and for a contradiction in what JetSpec writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dflash.drafter.keys import architecture

_CLASSES = {"Qwen3DFlashDraftModel": "DFlashDraftModel", "Qwen3DFlash2DraftModel": "DFlash2DraftModel"}


def plain(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plain form, if AutoModel wrote ``config``.

    Its JetSpec recipe trains with a causal block and says so in ``dflash_config.causal``; the ``is_causal`` false
    beside it is a leftover of the DFlash recipe that it extends.
    """
    name = _CLASSES.get(str(architecture(config)))
    if name is None:
        return config
    dflash = config.get("dflash_config")
    jetspec = isinstance(dflash, Mapping) and dflash.get("causal") is True
    return {**config, "architectures": [name], **({"is_causal": True} if jetspec else {})}
