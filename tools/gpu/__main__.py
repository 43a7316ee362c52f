"""``python -m tools.gpu run`` on a machine with a device (docs/development.md)."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tools.gpu import runner, tables, unpack

SITE = Path(tempfile.gettempdir(), "gpu-kit")
PAGE = unpack.ROOT / "docs/results/gpu.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="unpack the wheelhouse and run the steps")
    run.add_argument("--steps", default="all", help=f"with commas, of {', '.join(runner.BUDGETS)}; all: what is left")
    run.add_argument("--device", choices=(unpack.CUDA, unpack.FAKE, unpack.CPU), default=unpack.CUDA)
    run.add_argument("--minutes", type=float, default=9.5, help="for all steps together")
    run.add_argument("--pairs", default="", help="with commas; all of a step's pairs by default")
    run.add_argument("--layers", type=int, default=0, help="cut the published targets to this depth")
    run.add_argument("--site", type=Path, default=SITE, help="where the wheelhouse is unpacked")
    run.add_argument("--out", type=Path, default=Path("results/gpu"))
    asked = parser.parse_args()
    steps, site, out = runner.chosen(asked.steps), asked.site.absolute(), asked.out.absolute()
    if asked.steps == "all":
        steps = runner.left(out, steps)
        print("to do:", ", ".join(steps) or "nothing", flush=True)
    unpack.unpack(site)
    arguments = ("--device", asked.device, "--pairs", asked.pairs, "--layers", str(asked.layers))
    # A run that is told to end takes its step and the step's servers with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    plan = runner.Plan(steps, asked.minutes, arguments, patience=1 if asked.device == unpack.CUDA else 10)
    good = runner.run(plan, out, unpack.environment(site, asked.device))
    print("\n".join(tables.summary(out)))
    print("left:", ", ".join(runner.left(out, runner.chosen("all"))) or "nothing")
    if text := tables.page(out, asked.device):
        (PAGE if asked.device == unpack.CUDA else out / "page.md").write_text(text)
    sys.exit(not good)


if __name__ == "__main__":
    main()
