"""``sglang-dflash doctor``: which worker would serve DFLASH on this machine."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from sglang_dflash import __path__, __version__, upstream
from sglang_dflash.check.machine import find_gpu
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.choice import ON_ROCM
from sglang_dflash.plan.device import CPU, UNKNOWN_GPU, Device
from sglang_dflash.plan.division import size
from sglang_dflash.plan.settings import SWITCH, Settings
from sglang_dflash.upstream import TESTED_SGLANG, check_version, installed_version

# by common name; our tests all run on a CPU
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

    @property
    def is_untested(self) -> bool:
        return self.installed is not None and self.installed.partition("+")[0] not in self.tested


@dataclass(frozen=True)
class Report:
    machine: Device
    parts: list[Part]
    problem: DFlashError | None

    @property
    def worker(self) -> str:
        if self.problem is None:
            return "sglang-dflash"
        return "SGLang's own" if isinstance(self.problem, Builtin) and self.machine.kind == "gpu" else "none"

    @property
    def untested(self) -> list[str]:
        gpu = [self.machine.name] if self.machine.kind == "gpu" else []
        return gpu + [f"{part.name} {part.installed}" for part in self.parts if part.is_untested]

    def as_json(self) -> dict[str, Any]:
        error = self.problem
        problem = error and {"value": error.value, "expected": error.expected, "fix": error.remedy}
        about = {"worker": self.worker, "device": asdict(self.machine), "untested": self.untested}
        about |= {"folder": __path__[0], "plugins": _other_plugins()}
        return {"problem": problem, **about, "versions": {part.name: asdict(part) for part in self.parts}}

    def lines(self) -> Iterator[str]:
        if self.problem is None:
            yield f"sglang-dflash {__version__} serves DFLASH on {self.machine.name}."
        else:
            reason = f"{self.problem.value} (expected: {self.problem.expected})"
            yield f"sglang-dflash {__version__} does not serve DFLASH here: {reason}."
            yield f"Fix: {self.problem.remedy}."
        if self.untested:
            yield f"Untested: {', '.join(self.untested)}."
        yield f"\n{'worker':12}{self.worker}"
        memory = f", {size(self.machine.memory)}" if self.machine.memory else ""
        yield f"{'device':12}{self.machine.name}{memory}"
        for part in self.parts:
            yield f"{part.name:12}{part.installed or 'none'}"
        yield f"{'folder':12}{__path__[0]}"
        yield from (f"{'plugin':12}{plugin}" for plugin in _other_plugins())


def _other_plugins() -> list[str]:
    found = {(point.name, point.dist.name, point.dist.version) for point in upstream.installed_plugins() if point.dist}
    return [f"{name} of {owner} {version}" for name, owner, version in sorted(found) if owner != "sglang-dflash"]


def examine() -> Report:
    machine, problem = find_gpu() or CPU, None
    try:
        machine = _serving_machine()
    except DFlashError as error:
        problem = error
    return Report(machine, list(_parts()), problem)


def _serving_machine() -> Device:
    check_version()  # SGLang may be absent
    settings = Settings()
    settings.validate()
    if settings.wants_builtin:
        raise Builtin(f"{SWITCH}=builtin selects SGLang's own worker", expected="unset", remedy=f"unset {SWITCH}")
    warnings.simplefilter("ignore")  # absent accelerators
    try:
        from sglang_dflash.upstream.launch import load_plugins

        load_plugins()
        from sglang_dflash.launch import takeover
        from sglang_dflash.plugin import is_registered

        takeover.refuse_without_accelerator()
        machine = CPU if takeover.on_our_cpu_platform() else find_gpu() or UNKNOWN_GPU
    except (ImportError, OSError, RuntimeError) as error:
        raise DFlashError(
            f"SGLang {installed_version()} cannot be imported ({type(error).__name__}: {error})",
            expected="an SGLang that can be imported",
            remedy="repair the installation until `python -m sglang.launch_server --help` works",
        ) from error
    if not is_registered():
        raise Builtin(
            "SGLang did not load the plugin",
            expected="the plugin `dflash`",
            remedy="install sglang-dflash in SGLang's environment; unset SGLANG_PLUGINS, or add `dflash` to it",
        )
    if machine.is_rocm:
        raise Builtin(ON_ROCM, expected="a CUDA GPU", remedy="none needed: SGLang's own worker serves DFLASH here")
    takeover.check_sglang()
    return machine


def _parts() -> Iterator[Part]:
    for name, package in PARTS.items():
        yield Part(name, installed_version(package), TESTED.get(name, ()))
    torch = sys.modules.get("torch")
    yield Part("CUDA", torch.version.cuda if torch else None)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> None:
    """Check this environment: which worker would serve DFLASH, on which device, and which versions are untested.

    Load SGLang's plugins as a launch does, without a model. Exit status: 0 this package would serve DFLASH, 1 it would
    not (the first line gives the reason).

    Example: sglang-dflash doctor
    """
    report = examine()
    typer.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))
    raise typer.Exit(1 if report.problem else 0)
