"""The interface to SGLang: its version, hooks, and its names for every process."""

import os
from contextlib import suppress
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from packaging.version import InvalidVersion, Version

from sglang_dflash import __version__
from sglang_dflash.errors import DFlashError

TESTED_SGLANG = ".".join(__version__.split(".")[:3])
ALLOW_ANY_VERSION = "SGLANG_DFLASH_ALLOW_ANY_SGLANG"
SWITCH, BUILTIN = "SGLANG_DFLASH", "builtin"
_WAY_BACK = f"set {SWITCH}={BUILTIN} for SGLang's own worker"


def installed_plugins() -> list[EntryPoint]:
    """Return the entry points that SGLang loads at start: general plugins, then platforms."""
    return [*entry_points(group="sglang.srt.plugins"), *entry_points(group="sglang.srt.platforms")]


def installed_version(distribution: str = "sglang") -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_version() -> str | None:
    """Raise DFlashError for an untested SGLang; return a note if it is a build of the tested release."""
    found = installed_version()
    if found == TESTED_SGLANG or os.environ.get(ALLOW_ANY_VERSION) == "1":
        return None
    with suppress(InvalidVersion):
        # .post1, .dev3, rc1, +cu129
        if Version(Version(found or "").base_version) == Version(TESTED_SGLANG):
            return f"treating SGLang {found} as {TESTED_SGLANG}, the release that this package is tested with"
    raise DFlashError(
        f"SGLang is {found or 'not installed'}, and sglang-dflash {__version__} is for {TESTED_SGLANG}",
        remedy=f"{_WAY_BACK}, install sglang=={TESTED_SGLANG}, or set {ALLOW_ANY_VERSION}=1 to try this pair",
    )


def misfit(error: Exception) -> DFlashError:
    """Return the error for an SGLang that lacks a name; ``error`` is what the import raised."""
    return DFlashError(
        f"SGLang {installed_version()} differs from what sglang-dflash {__version__} needs "
        f"({type(error).__name__}: {error})",
        remedy=f"{_WAY_BACK}, or install sglang=={TESTED_SGLANG}",
    )
