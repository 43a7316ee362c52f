"""Threads and cores of the ranks on a CPU machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import pairwise

from sglang_dflash.errors import DFlashError

BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


def cores_per_rank(cores: list[int], ranks: int) -> list[list[int]]:
    """Split ``cores`` into one contiguous group a rank; ranks share cores if there are fewer cores than ranks."""
    if ranks >= len(cores):
        return [[cores[rank % len(cores)]] for rank in range(ranks)]
    size, extra = divmod(len(cores), ranks)
    starts = [rank * size + min(rank, extra) for rank in range(ranks + 1)]
    return [cores[first:last] for first, last in pairwise(starts)]


def environment_defaults(ranks: int, conv_dtype: str) -> dict[str, str]:
    """Variables that a CPU server needs and that the user has not set.

    Args:
        ranks: processes that run the model (tensor x pipeline x data parallel).
        conv_dtype: dtype of the model, for the convolution state: SGLang's default, bfloat16, silently rounds the
            state of a float32 model and makes its snapshots fail on a dtype mismatch.

    Returns:
        Name to value, only for variables missing in the environment. Threads default to one a rank: OpenMP workers
        spin while they wait, and two spinning ranks on two cores ran 100 times slower than two single threads.
    """
    wanted = {"OMP_NUM_THREADS": "1", "SGLANG_MAMBA_CONV_DTYPE": conv_dtype}
    if ranks > 1:
        groups = cores_per_rank(sorted(os.sched_getaffinity(0)), ranks)
        wanted[BIND_VARIABLE] = "|".join(",".join(map(str, group)) for group in groups)
        # The ranks of a machine share its memory, so one that looks later may find less, whoever took it meanwhile.
        wanted["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def parse_cores(text: str) -> set[int]:
    """``"0-2,5"`` to ``{0, 1, 2, 5}``: the syntax of one group of ``SGLANG_CPU_OMP_THREADS_BIND``.

    Raises:
        DFlashError: it is something else.
    """
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        if found is None:
            raise DFlashError(
                f"{BIND_VARIABLE}: {part!r}", expected="cores such as 0-2,5", remedy=f"correct or unset {BIND_VARIABLE}"
            )
        cores.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return cores


def threads_of_a_rank(environ: Mapping[str, str] = os.environ) -> int:
    """``OMP_NUM_THREADS``; of a list, one for each level of nested teams, the first.

    Raises:
        DFlashError: it is no number of threads.
    """
    value = environ.get("OMP_NUM_THREADS", "1")
    first = value.partition(",")[0].strip()
    if re.fullmatch("0*[1-9][0-9]{0,4}", first):
        return int(first)
    raise DFlashError(f"OMP_NUM_THREADS={value!r}", expected="a number of threads", remedy="unset OMP_NUM_THREADS")


def bind_rank(*, local_omp_cpuid: str | None, dist_init_method: str | None = None) -> None:
    """Bind this rank to its cores and cap its threads; stands in for SGLang's AMX-only ``_init_cpu_threads_env``.

    Args:
        local_omp_cpuid: this rank's group of cores, as :func:`parse_cores` reads it; None binds nothing.
        dist_init_method: rendezvous address that upstream's version names shared memory after; not needed here.
    """
    import torch

    if local_omp_cpuid:
        os.sched_setaffinity(0, parse_cores(local_omp_cpuid) & os.sched_getaffinity(0) or os.sched_getaffinity(0))
    torch.set_num_threads(threads_of_a_rank())
