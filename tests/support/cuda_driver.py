"""A CUDA driver for machines without one: the few functions that describe a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = """
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

int cuInit(unsigned flags) {{ {init} }}
int cuDeviceGet(int *device, int ordinal) {{ *device = ordinal; return ordinal < {count} ? 0 : 101; }}
int cuDeviceGetName(char *name, int length, int device) {{ snprintf(name, length, "{name}"); return 0; }}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {{ *bytes = (size_t){mib} << 20; return 0; }}
int cuDeviceGetAttribute(int *value, int attribute, int device) {{ *value = attribute == 75 ? 9 : 0; return 0; }}
"""


def driver(folder: Path, name: str, mib: int = 143_771, *, count: int = 1, init: str = "return 0;") -> str:
    """Compile a driver of ``count`` equal GPUs of Hopper's kind; return the folder for ``LD_LIBRARY_PATH``.

    Args:
        init: the body of ``cuInit``.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = _SOURCE.format(name=name, mib=mib, count=count, init=init)
    library = str(folder / "libcuda.so.1")
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=source, text=True, check=True)
    return str(folder)
