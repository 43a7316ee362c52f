"""What a step works with: where it runs, where its rows go, and servers with the flags that the device needs."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu import records
from tools.gpu.unpack import CPU, CUDA, FAKE

# No FlashInfer and no sgl_kernel on the machine: SGLang's Triton attention and its sampler in torch.
TRITON = (
    *("--attention-backend", "triton", "--speculative-draft-attention-backend", "triton"),
    *("--sampling-backend", "pytorch"),
)
EAGER = "--disable-cuda-graph"


class Skip(Exception):
    """The step cannot run here; its text says why."""


@dataclass(frozen=True)
class Run:
    """One step's run.

    Attributes:
        device: ``cuda``, ``fake`` or ``cpu`` (:mod:`tools.gpu.unpack`).
        out: the folder of its rows, logs and traces.
        step: its name, which is its file's.
        pairs: which pairs it measures; empty for all.
        layers: the published targets' depth, 0 for what their cards say.
    """

    device: str
    out: Path
    step: str
    pairs: tuple[str, ...] = ()
    layers: int = 0

    @property
    def real(self) -> bool:
        return self.device == CUDA

    def flags(self, *, speculative: bool, eager: bool = False) -> tuple[str, ...]:
        """Server flags of the device, for a server with or without a drafter."""
        if self.device == CPU:
            return ()
        backends = TRITON if speculative else (*TRITON[:2], *TRITON[4:])
        small = ("--max-total-tokens", "4096") if self.device == FAKE else ()
        # A faked device has no graphs.
        return (*backends, *small, *((EAGER,) if eager or self.device == FAKE else ()))

    def write(self, **row: Any) -> None:
        records.append(self.out, self.step, {"device": self.device, **row})
        print(row, flush=True)

    def finished(self, **key: Any) -> bool:
        """Whether an earlier run has a row with this key and no error: a step goes on where it was interrupted."""
        rows = (row for row in records.read(self.out, self.step) if "error" not in row)
        return any(all(row.get(name) == value for name, value in key.items()) for row in rows)

    def measure(self, key: dict[str, Any], measured: Callable[[], dict[str, Any]]) -> bool:
        """Write one row, or what went wrong; the next one is measured all the same. False if it went wrong."""
        if self.finished(device=self.device, **key):
            return True
        start = time.monotonic()
        try:
            found = measured()
        except Exception as error:  # noqa: BLE001 - a server's end, a wrong answer: all of it is a result
            found = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        self.write(**key, **found, seconds=round(time.monotonic() - start, 1))
        return "error" not in found

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A place for a server's log and configurations."""
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def main(step: str, body: Callable[[Run], bool], arguments: Sequence[str] | None = None) -> None:
    """A step's command line. Exits with 1 if something went wrong, with 3 if the step cannot run here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=CUDA)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", default="")
    parser.add_argument("--layers", type=int, default=0)
    asked = parser.parse_args(arguments)
    run = Run(asked.device, asked.out, step, tuple(filter(None, asked.pairs.split(","))), asked.layers)
    try:
        raise SystemExit(0 if body(run) else 1)
    except Skip as reason:
        run.write(skipped=str(reason))
        raise SystemExit(3) from None
