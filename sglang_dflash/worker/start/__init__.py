"""Start-up, and the duration of its parts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

seconds = dict[str, float]()  # by part, as in ``/server_info``


@contextmanager
def timed(part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[part] = round(time.perf_counter() - began, 2)


def since_start() -> float:
    return time.time() - psutil.Process().create_time()
