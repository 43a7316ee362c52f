"""The package's own source: nothing in it runs or unpickles what a model brings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / name for name in ("sglang_dflash", "cpu_platform/sglang_dflash_cpu", "lab/sglang_dflash_lab")]
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.jit.load",
    "yaml.load",
    "runpy.run_path",
}
MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "runpy", "code"}
SAFE = {"allow_pickle": "False", "trust_remote_code": "False", "shell": "False"}
ALLOWED = {
    ("sglang_dflash/drafter/tensors.py", "imports pickle"),  # for the name of an exception
    # programs of our own corpus, from a syntax tree of arithmetic alone
    ("lab/sglang_dflash_lab/pairs/corpus/code_task.py", "exec"),
    ("lab/sglang_dflash_lab/pairs/corpus/code_task.py", "compile"),
}


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            yield from (f"imports {name}" for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
            yield from [name] if name in CALLS else []
            yield from (key for key, safe in SAFE.items() if keywords.get(key, safe) != safe)
            if name.endswith("torch.load") and keywords.get("weights_only") != "True":
                yield "torch.load without weights_only=True"


def test_nothing_runs_what_a_model_brings() -> None:
    paths = (path for package in PACKAGES for path in package.rglob("*.py"))
    files = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}
    assert len(files) > 100
    assert {(file, danger) for file, tree in files.items() for danger in dangers(tree)} == ALLOWED
