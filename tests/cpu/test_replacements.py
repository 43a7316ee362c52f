"""What the CPU platform puts in SGLang's place still fits: targets, parameters, registries, platform methods."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("sglang")

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.platforms.interface import SRTPlatform

from sglang_dflash_cpu.layers.attention_backend import TorchAttentionBackend
from sglang_dflash_cpu.layers.pools import CpuKVPool
from sglang_dflash_cpu.platform import DFlashCpuPlatform
from sglang_dflash_cpu.replacements import TABLE, Replacement
from tests.house.contract import replaced
from tests.support import preloaded

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.path.rsplit(".", 1)[1])
def test_a_replacement_can_be_called_like_its_target(row: Replacement) -> None:
    """Its positional parameters come in the target's order, and it takes every parameter of the target."""
    target = replaced(row)
    assert target.problem() is None
    theirs = list(inspect.signature(target.resolve()).parameters)
    ours = list(inspect.signature(row.function).parameters.values())[row.partial :]
    positional = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = [p.name for p in ours if p.kind is p.KEYWORD_ONLY]
    assert target.params and positional == theirs[: len(positional)]
    assert set(by_name) <= set(theirs)
    if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in ours):
        assert set(positional + by_name) == set(theirs)


@pytest.mark.parametrize(
    ("ours", "theirs", "private"),
    [
        (DFlashCpuPlatform, SRTPlatform, ()),
        (CpuKVPool, MHATokenToKVPool, ("_init_kv_copy_and_warmup", "_store_kv_layer")),
        (TorchAttentionBackend, AttentionBackend, ()),
    ],
    ids=["platform", "kv_pool", "attention_backend"],
)
def test_every_override_overrides_something(ours: type, theirs: type, private: tuple[str, ...]) -> None:
    """A method that upstream renamed would be dead code here, and the fault that it cures would be back."""
    functions = {name: value for name, value in vars(ours).items() if inspect.isfunction(value) and name[0] != "_"}
    public = [name for name, value in functions.items() if value.__name__ == name]  # no alias
    assert public
    for name in (*public, *private):
        assert hasattr(theirs, name), f"{theirs.__name__} has no {name}"
        got, wanted = (inspect.signature(getattr(kind, name)).parameters for kind in (ours, theirs))
        if not any(p.kind is p.VAR_KEYWORD for p in got.values()):
            missing = {n for n, p in wanted.items() if p.kind is not p.VAR_KEYWORD} - set(got)
            assert not missing, f"{ours.__name__}.{name} does not take {missing}"


def test_a_cuda_build_of_torch_has_no_accelerator_here() -> None:
    """It names CUDA without a GPU too, so SGLang's ``get_device_module().synchronize()`` would end the server."""
    # As a CUDA build answers; the module was requested before.
    build = "torch._C._accelerator_getAccelerator = lambda: torch.device('cuda'); torch.get_device_module()"
    program = f"""import torch; {build}
from sglang_dflash_cpu import replacements
replacements.install()
print(torch.get_device_module().__name__, torch.accelerator.current_accelerator())"""
    ended = preloaded.run("-c", program)
    assert ended.stdout.splitlines()[-1:] == ["torch.cpu None"], ended.stderr
