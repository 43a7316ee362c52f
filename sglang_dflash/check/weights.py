"""Do the drafter's tensors have the names and shapes that its configuration promises? Headers only."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_dflash.check.findings import Finding, of_error, ok, warn
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.files import TensorHeader
from sglang_dflash.drafter.tensors import LoadReport, expected_shapes
from sglang_dflash.errors import DFlashError


def check_weights(drafter: DrafterConfig, tensors: Mapping[str, TensorHeader] | None) -> Finding:
    """Compare headers with the configuration, by the loader's own rules.

    Args:
        drafter: the parsed configuration.
        tensors: the checkpoint's headers, None where none could be read.
    """
    about = "drafter's tensors"
    if tensors is None:
        return warn(
            about,
            "no safetensors header can be read",
            expected="a safetensors checkpoint",
            remedy="none needed: the loader checks names and shapes again",
        )
    report = LoadReport(expected_shapes(drafter), quantized=drafter.quantization is not None)
    for name, header in tensors.items():
        report.accepts(name.removeprefix("model."), header.shape)
    try:
        report.check(complete=True)
    except DFlashError as raised:
        return of_error(about, raised)
    return ok(about, f"{len(tensors)}, as config.json describes them")
