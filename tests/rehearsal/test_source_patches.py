"""What a rehearsal changes in SGLang is there to be changed."""

from __future__ import annotations

import pkgutil

import pytest

from sglang_dflash.upstream import CUDA_SYMBOLS
from tests.rehearsal.source_patches import PATCHES, SourcePatch
from tests.rehearsal.stubs import ON_THE_GPU, STUBS

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.function.rsplit(".", 1)[1])
def test_a_patched_line_is_there_once(patch: SourcePatch) -> None:
    assert patch.source().count(patch.old) == 1


ONLY_ON_A_GPU = {symbol.path for symbol in CUDA_SYMBOLS.values()}


@pytest.mark.parametrize("path", sorted({stub.path for stub in STUBS} - ONLY_ON_A_GPU))
def test_a_stub_stands_for_something(path: str) -> None:
    if not path.startswith("torch.cpu."):  # which lacks what only a GPU has
        assert pkgutil.resolve_name(path) is not None


@pytest.mark.parametrize("module", sorted(ON_THE_GPU))
def test_a_module_on_the_gpu_asks_for_the_device(module: str) -> None:
    source = pkgutil.resolve_name(module).__file__
    assert source is not None
    with open(source) as file:
        text = file.read()
    assert "is_cuda" in text or "is_cpu" in text
