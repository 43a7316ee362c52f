"""transformers, importable beside a CPU build of PyTorch (see `torchvision_import`)."""

from __future__ import annotations

from sglang_dflash import torchvision_import

torchvision_import.install()

import transformers  # noqa: E402

__all__ = ["transformers"]
