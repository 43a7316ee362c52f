"""What a user of one SGLang release gets: a plain and a DFLASH command, resolved as a server does.

``python -m tools.contract.start OUT.json`` runs in a process whose ``sglang`` is that release and that finds this
package's plugin and platform. DFLASH is asked for twice, the second time with the variable that lets any version pass.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from sglang_dflash.pairs import WEIGHTS
from sglang_dflash.upstream import ALLOW_ANY_VERSION

PAIR = WEIGHTS / "tiny-hybrid"
PLAIN = ["--model-path", str(PAIR / "target"), "--dtype", "float32"]
DFLASH = [*PLAIN, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(PAIR / "drafter-good")]


def outcome(arguments: list[str]) -> str:
    """``"starts"``, or the error in one line."""
    try:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()
        prepare_server_args(arguments).resolve_once()
    except (Exception, SystemExit) as error:  # noqa: BLE001  another release may end in any way
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "starts"


def main(out: Path) -> None:
    os.environ.pop(ALLOW_ANY_VERSION, None)
    outcomes = {"plain": outcome(PLAIN), "DFLASH": outcome(DFLASH)}
    os.environ[ALLOW_ANY_VERSION] = "1"
    outcomes["DFLASH, any version allowed"] = outcome(DFLASH)
    out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
