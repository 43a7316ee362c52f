"""A folder from which SGLang loads a drafter that another trainer or a quantising tool wrote: the plain
``config.json``, the same weights.

SGLang reads a drafter's configuration in many places, through transformers, which knows neither the classes nor the
nesting of other trainers. It gets the plain form in a folder of this user's cache; the weights in it are links.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.mask_embedding import FILE as MASK_EMBEDDING
from sglang_dflash.drafter.quantisation import MODELOPT
from sglang_dflash.drafter.reading import inside, views
from sglang_dflash.errors import DFlashError

_WEIGHTS = ".safetensors"
_COPIED = (".json", ".jinja", ".txt", ".model", MASK_EMBEDDING)


def plain_view(files: ModelFiles) -> Path | None:
    """The folder to load a drafter from; None if the drafter's own is plain.

    A drafter on the hub is downloaded first, as SGLang would do later.

    Raises:
        DFlashError: the trainer's form cannot be served, a file leads out of the drafter's folder, or the view cannot
            be written.
    """
    if files.config == files.published:
        return None
    source = _snapshot(files)
    names = sorted(file.name for file in source.iterdir() if file.name.endswith((_WEIGHTS, *_COPIED)))
    # SGLang would build quantised layers from Model Optimizer's file.
    names = [name for name in names if inside(source, name) and not (files.dequantise and name == MODELOPT)]
    # Another content is another folder: one that a server loads from never changes.
    content = [str(source.resolve()), files.config, [(name, (source / name).stat().st_mtime_ns) for name in names]]
    view = views() / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    if not view.is_dir():
        try:
            _write(view, source, names, files)
        except OSError as error:
            raise DFlashError(
                f"{view} cannot be written ({error.strerror or error})",
                expected="a folder for the plain form of a drafter that another trainer wrote",
                remedy="set XDG_CACHE_HOME to a folder that can be written",
            ) from None
    return view


def _write(view: Path, source: Path, names: list[str], files: ModelFiles) -> None:
    view.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=view.parent) as folder:
        draft = Path(folder) / "view"
        draft.mkdir()
        for name in names:
            if name.endswith(_WEIGHTS):
                (draft / name).symlink_to((source / name).resolve())
            else:
                shutil.copyfile(source / name, draft / name)
        (draft / "config.json").write_text(json.dumps(files.config, indent=2), encoding="utf-8")
        try:
            draft.rename(view)
        except OSError:
            if not view.is_dir():  # else another server has just written the same
                raise


def _snapshot(files: ModelFiles) -> Path:
    if files.is_local:
        return Path(files.name)
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in (_WEIGHTS, *_COPIED)]
    return Path(snapshot_download(files.name, revision=files.revision, allow_patterns=patterns))
