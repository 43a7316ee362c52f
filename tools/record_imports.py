"""Record the modules that a run imports in all its processes, for ``tools/imported.txt``.

GPU_KIT_RECORD=/tmp/imports make gpu STEPS=engine     # and the same with DEVICE=cpu
python tools/record_imports.py /tmp/imports > tools/imported.txt
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

# Distributions that are packed in part.
PACKAGES = ("sglang", "transformers", "torchvision", "pygments", "PIL", "tvm_ffi")
HEADER = "# Modules that some process of a run has imported; made by tools/record_imports.py."
# Compiled for SGLang's own torch release: must not be packed.
NOT_THESE = {"sglang.srt.mem_cache.rust_tree_core.mem_cache"}
SECONDS = 1.0


def start(folder: str) -> None:
    """Write this process's modules every second, since SGLang ends its processes with SIGKILL."""
    Path(folder).mkdir(parents=True, exist_ok=True)

    def keep_writing() -> None:
        while True:
            write(Path(folder) / f"{os.getpid()}.txt")
            time.sleep(SECONDS)

    threading.Thread(target=keep_writing, daemon=True).start()


def write(path: Path) -> None:
    names = [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None)]
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("\n".join(sorted(names)))
    unfinished.replace(path)


def merged(folder: Path) -> list[str]:
    """All recorded modules of :data:`PACKAGES`."""
    names = {name for path in folder.glob("*.txt") for name in path.read_text().splitlines()}
    return sorted(name for name in names - NOT_THESE if name.partition(".")[0] in PACKAGES)


if __name__ == "__main__":
    print("\n".join([HEADER, *merged(Path(sys.argv[1]))]))
