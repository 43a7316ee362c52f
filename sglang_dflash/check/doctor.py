"""``sglang-dflash doctor``: which worker would serve DFLASH on this machine."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from sglang_dflash import __path__, __version__, upstream
from sglang_dflash.check.machine import find_gpu
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.choice import ON_ROCM
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU, Device
from sglang_dflash.launch.division import size
from sglang_dflash.launch.settings import SWITCH, Settings
from sglang_dflash.upstream import TESTED_SGLANG, check_version, installed_version

# by common name
PARTS = {
    "SGLang": "sglang",
    "torch": "torch",
    "Triton": "triton",
    "FlashInfer": "flashinfer-python",
    "sgl-kernel": "sglang-kernel",
}
TESTED = {"SGLang": (TESTED_SGLANG,), "torch": ("2.13.0", "2.14.1"), "Triton": ("3.8.0",)}


class Builtin(DFlashError):
    """SGLang's own worker would serve DFLASH on a GPU, and nothing on a CPU."""


@dataclass(frozen=True)
class Part:
    name: str
    installed: str | None
    tested: tuple[str, ...] = ()


@dataclass(frozen=True)
class Installation:
    device: Device
    parts: list[Part]
    problem: DFlashError | None
    patched: Sequence[str] = ()  # of SGLang, in this process

    @property
    def worker(self) -> str:
        if self.problem is None:
            return "sglang-dflash"
        return "SGLang's own" if isinstance(self.problem, Builtin) and self.device.kind == "gpu" else "none"

    @property
    def untested(self) -> list[str]:
        gpu = [self.device.name] if self.device.kind == "gpu" else []
        installed = ((part, part.installed.partition("+")[0]) for part in self.parts if part.installed)
        return gpu + [f"{part.name} {part.installed}" for part, release in installed if release not in part.tested]

    def as_json(self) -> dict[str, Any]:
        error = self.problem
        problem = error and {"value": error.problem, "fix": error.remedy}
        about = {"worker": self.worker, "device": asdict(self.device), "untested": self.untested}
        about |= {"folder": __path__[0], "plugins": _other_plugins(), "patched": self.patched}
        return {"problem": problem, **about, "versions": {part.name: asdict(part) for part in self.parts}}

    def lines(self, *, verbose: bool = False) -> Iterator[str]:
        if self.problem is None:
            yield f"sglang-dflash {__version__} serves DFLASH on {self.device.name}."
        else:
            yield f"sglang-dflash {__version__} does not serve DFLASH here: {self.problem.problem}."
            yield f"Fix: {self.problem.remedy}."
        if self.untested:
            yield f"Untested: {', '.join(self.untested)}."
        memory = f", {size(self.device.memory)}" if self.device.memory else ""
        facts = {"worker": self.worker, "device": f"{self.device.name}{memory}"}
        facts |= {part.name: part.installed or "none" for part in self.parts}
        facts |= {"folder": __path__[0], "plugins": "; ".join(_other_plugins()) or "none"}
        yield ""
        yield from (f"{name:12}{value}" for name, value in facts.items())
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
        return Installation(find_gpu() or CPU, list(_parts()), problem)
    return Installation(device, list(_parts()), None, patched)


def _serving_device() -> tuple[Device, list[str]]:
    check_version()  # SGLang may be absent
    settings = Settings()
    settings.validate()
    if settings.wants_builtin:
        raise Builtin(f"{SWITCH}=builtin selects SGLang's own worker", remedy=f"unset {SWITCH}")
    warnings.simplefilter("ignore")  # absent accelerators
    try:
        from sglang_dflash.upstream.launch import load_plugins

        load_plugins()
        from sglang_dflash.launch import told
        from sglang_dflash.plugin import is_registered
        from sglang_dflash.upstream.hooks import installed

        told.refuse_without_accelerator()
        device = CPU if told.on_our_cpu_platform() else find_gpu() or UNKNOWN_GPU
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
    told.check_sglang()
    return device, installed()


def _parts() -> Iterator[Part]:
    for name, package in PARTS.items():
        yield Part(name, installed_version(package), TESTED.get(name, ()))
    torch = sys.modules.get("torch")
    yield Part("CUDA", torch.version.cuda if torch else None)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="List what is patched in SGLang.")] = False,
) -> None:
    """Check this environment: which worker would serve DFLASH, on which device, and which versions are untested.

    Load SGLang's plugins as a launch does, without a model. Exit status: 0 this package would serve DFLASH, 1 it would
    not (the first line gives the reason).

    Example: sglang-dflash doctor
    """
    report = examine()
    typer.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines(verbose=verbose)))
    raise typer.Exit(1 if report.problem else 0)
