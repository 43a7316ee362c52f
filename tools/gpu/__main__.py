"""``python -m tools.gpu run`` on a machine with a device, ``python -m tools.gpu table`` anywhere (docs/gpu.md)."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tools.gpu import runner, tables, unpack


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="unpack the wheelhouse and run the steps")
    run.add_argument("--steps", default="all", help=f"with commas, of {', '.join(runner.BUDGETS)}")
    run.add_argument("--out", type=Path, default=Path("results/gpu"))
    run.add_argument("--device", choices=(unpack.CUDA, unpack.FAKE, unpack.CPU), default=unpack.CUDA)
    run.add_argument("--minutes", type=float, default=9.5, help="for all steps together")
    run.add_argument("--pairs", default="", help="with commas; all of a step's pairs by default")
    run.add_argument("--layers", type=int, default=0, help="cut the published targets to this depth")
    run.add_argument(
        "--site", type=Path, default=Path(tempfile.gettempdir(), "gpu-kit"), help="where the wheelhouse is unpacked"
    )
    table = commands.add_parser("table", help="the tables of the rows, into docs/results/gpu.md")
    table.add_argument("--out", type=Path, default=Path("results/gpu"))
    table.add_argument("--page", type=Path, default=unpack.ROOT / "docs/results/gpu.md")
    asked = parser.parse_args()
    if asked.command == "table":
        asked.page.write_text(tables.filled(asked.page.read_text(), asked.out))
        return
    steps, site = runner.chosen(asked.steps), asked.site.absolute()
    unpack.unpack(site)
    arguments = ("--device", asked.device, "--pairs", asked.pairs, "--layers", str(asked.layers))
    # A run that is told to end takes its step and the step's servers with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    plan = runner.Plan(steps, asked.minutes, arguments)
    good = runner.run(plan, asked.out.absolute(), unpack.environment(site, asked.device))
    print("\n".join(tables.summary(asked.out)))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
