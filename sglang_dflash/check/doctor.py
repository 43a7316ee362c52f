"""``sglang-dflash doctor``: which worker would serve DFLASH on this machine."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_dflash import __path__, __version__, upstream
from sglang_dflash.check.machine import find_gpu
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU, Device
from sglang_dflash.launch.division import size
from sglang_dflash.launch.settings import SWITCH, Settings
from sglang_dflash.launch.which_worker import ON_ROCM
from sglang_dflash.upstream import TESTED_SGLANG, check_version, installed_version

# distributions by common name
PARTS = {
    "SGLang": "sglang",
    "torch": "torch",
    "Triton": "triton",
    "FlashInfer": "flashinfer-python",
    "sgl-kernel": "sglang-kernel",
}
TESTED = {"SGLang": (TESTED_SGLANG,), "torch": ("2.13.0", "2.14.1"), "Triton": ("3.8.0",)}  # on CPUs
ON_A_GPU = {"torch": "2.11.0", "Triton": "3.6.0", "CUDA": "13.0", "device": "NVIDIA H200"}  # docs/internals/gpu.md


class Builtin(DFlashError):
    """SGLang's own worker would serve DFLASH on a GPU, and nothing on a CPU."""


@dataclass(frozen=True)
class Installation:
    device: Device
    versions: dict[str, str | None]
    problem: DFlashError | None
    patched: Sequence[str] = ()  # names of SGLang that this process patches

    @property
    def worker(self) -> str:
        if self.problem is None:
            return "sglang-dflash"
        return "SGLang's own" if isinstance(self.problem, Builtin) and self.device.kind == "gpu" else "none"

    @property
    def untested(self) -> list[str]:
        found = self.versions | ({"device": self.device.name} if self.device.kind == "gpu" else {"CUDA": None})
        new = {
            name: each
            for name, each in found.items()
            if each and each.partition("+")[0] not in (*TESTED.get(name, ()), ON_A_GPU.get(name))
        }
        return [each if name == "device" else f"{name} {each}" for name, each in new.items()]

    def as_json(self) -> dict[str, Any]:
        problem = self.problem and {"value": self.problem.problem, "fix": self.problem.remedy}
        found = {"problem": problem, "worker": self.worker, "device": asdict(self.device), "untested": self.untested}
        found |= {"folder": __path__[0], "plugins": _other_plugins(), "versions": self.versions}
        return found | {"patched": self.patched}

    def lines(self, *, verbose: bool = False) -> Iterator[str]:
        if self.problem is None:
            yield f"sglang-dflash {__version__} serves DFLASH on {self.device.name}."
        else:
            yield f"sglang-dflash {__version__} does not serve DFLASH here: {self.problem.problem}."
            yield f"Fix: {self.problem.remedy}."
        found = self.as_json()
        if self.untested:
            yield f"Untested: {', '.join(self.untested)}."
        memory = f", {size(self.device.memory)}" if self.device.memory else ""
        facts = {"worker": self.worker, "device": f"{self.device.name}{memory}", **self.versions}
        facts |= {"folder": found["folder"], "plugins": "; ".join(found["plugins"])}
        yield ""
        yield from (f"{name:12}{value or 'none'}" for name, value in facts.items())
        if verbose:
            yield "\nPatched in SGLang here; a scheduler adds what its plan needs (enter.py: tables)"
            yield from self.patched


def _other_plugins() -> list[str]:
    found = {(point.name, point.dist.name, point.dist.version) for point in upstream.installed_plugins() if point.dist}
    return [f"{name} of {owner} {version}" for name, owner, version in sorted(found) if owner != "sglang-dflash"]


def examine() -> Installation:
    try:
        device, patched = _serving_device()
    except DFlashError as problem:
        return Installation(find_gpu() or CPU, _versions(), problem)
    return Installation(device, _versions(), None, patched)


def _serving_device() -> tuple[Device, list[str]]:
    check_version()  # SGLang may be absent
    settings = Settings()
    settings.validate()
    if settings.wants_builtin:
        raise Builtin(f"{SWITCH}=builtin selects SGLang's own worker", remedy=f"unset {SWITCH}")
    warnings.simplefilter("ignore")  # absent accelerators
    try:
        from sglang_dflash.upstream.names import load_plugins

        load_plugins()
        from sglang_dflash.launch import resolution
        from sglang_dflash.plugin import is_registered
        from sglang_dflash.upstream.hooks import installed

        resolution.refuse_without_accelerator()
        device = CPU if resolution.on_our_cpu_platform() else find_gpu() or UNKNOWN_GPU
    except (ImportError, OSError, RuntimeError) as error:
        raise DFlashError(
            f"SGLang {installed_version()} cannot be imported ({type(error).__name__}: {error})",
            remedy="repair the installation until `python -m sglang.launch_server --help` works",
        ) from error
    if not is_registered():
        raise Builtin(
            "SGLang did not load the plugin",
            remedy="install sglang-dflash in SGLang's environment; unset SGLANG_PLUGINS, or add `dflash` to it",
        )
    if device.is_rocm:
        raise Builtin(ON_ROCM, remedy="none needed: SGLang's own worker serves DFLASH here")
    resolution.check_sglang()
    return device, installed()


def _versions() -> dict[str, str | None]:
    torch = sys.modules.get("torch")
    return {name: installed_version(package) for name, package in PARTS.items()} | {
        "CUDA": torch.version.cuda if torch else None
    }
