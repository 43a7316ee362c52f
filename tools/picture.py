"""Run the demo on this machine and draw what it prints: ``python -m tools.picture docs/demo.svg``, ``make picture``."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path

import rich
from rich._export_format import CONSOLE_SVG_FORMAT

from sglang_dflash_lab.bench.demo import main


def record(file: Path) -> None:
    # Not as a terminal, which would write every frame of an answer over the last: a recording keeps them all.
    rich.reconfigure(record=True, width=110, force_terminal=False)
    main()
    # The reader's own font: a picture in a page loads none.
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code, ", "")
    rich.get_console().save_svg(str(file), title="make demo", code_format=form)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    record(parser.parse_args().file)
