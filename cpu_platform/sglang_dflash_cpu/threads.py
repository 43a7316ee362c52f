"""Threads and cores of the ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import numpy as np

from sglang_dflash.errors import DFlashError

BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


def cores_per_rank(cores: list[int], ranks: int) -> list[list[int]]:
    """Split ``cores`` into one contiguous group per rank; ranks share cores if there are fewer."""
    if ranks >= len(cores):
        return [[cores[rank % len(cores)]] for rank in range(ranks)]
    return [group.tolist() for group in np.array_split(cores, ranks)]


def environment_defaults(ranks: int, conv_dtype: str) -> dict[str, str]:
    """Return the variables that a CPU server needs and that the environment lacks.

    Args:
        ranks: processes that run the model (tensor x pipeline x data parallel).
        conv_dtype: the model's dtype; SGLang's default, bfloat16, rounds a float32 model's state and breaks its
            snapshots.
    """
    # Waiting OpenMP workers spin: two ranks of two threads on two cores ran 100 times slower than single ones.
    wanted = {"OMP_NUM_THREADS": "1", "SGLANG_MAMBA_CONV_DTYPE": conv_dtype}
    if ranks > 1:
        groups = cores_per_rank(sorted(os.sched_getaffinity(0)), ranks)
        wanted[BIND_VARIABLE] = "|".join(",".join(map(str, group)) for group in groups)
        # Ranks share the machine's memory, so their free memory differs.
        wanted["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def parse_cores(text: str) -> set[int]:
    """Parse a group of ``SGLANG_CPU_OMP_THREADS_BIND``: ``"0-2,5"`` to ``{0, 1, 2, 5}``; else raise a DFlashError."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        if found is None:
            remedy = f"correct or unset {BIND_VARIABLE}"
            raise DFlashError(f"{BIND_VARIABLE}: {part!r} names no cores, as 0-2,5 does", remedy=remedy)
        cores.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return cores


def threads_of_a_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the first number in ``OMP_NUM_THREADS``, else raise a DFlashError."""
    value = environ.get("OMP_NUM_THREADS", "1")
    first = value.partition(",")[0].strip()
    if re.fullmatch("0*[1-9][0-9]{0,4}", first):
        return int(first)
    raise DFlashError(f"OMP_NUM_THREADS={value!r} is no number of threads", remedy="unset it")


def bind_rank(*, local_omp_cpuid: str | None, dist_init_method: str | None = None) -> None:
    """Bind this rank to the cores ``local_omp_cpuid`` and cap its threads, in place of ``_init_cpu_threads_env``."""
    import torch

    if local_omp_cpuid:
        os.sched_setaffinity(0, parse_cores(local_omp_cpuid) & os.sched_getaffinity(0) or os.sched_getaffinity(0))
    torch.set_num_threads(threads_of_a_rank())
