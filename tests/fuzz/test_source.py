"""The package's own source: nothing in it runs or unpickles what a model brings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_dflash

PACKAGE = Path(sglang_dflash.__file__).parent
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
# What is allowed, and why.
ALLOWED = {
    ("drafter/mask_embedding.py", "imports pickle"): "for the name of an exception of PyTorch's restricted reader",
    (
        "pairs/corpus/code_task.py",
        "exec",
    ): "programs of our own corpus, from a syntax tree that allows arithmetic alone",
    ("pairs/corpus/code_task.py", "compile"): "likewise",
}


def uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _call(node)
        elif isinstance(node, ast.Import):
            yield from (f"imports {each.name}" for each in node.names if each.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"imports {node.module}"


def _call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in CALLS:
        yield name
    keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
    if name.endswith("torch.load") and keywords.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if keywords.get("allow_pickle", "False") != "False":
        yield "allow_pickle"
    if keywords.get("trust_remote_code", "False") != "False":
        yield "trust_remote_code"
    if keywords.get("shell", "False") != "False":
        yield "shell"


def test_nothing_runs_what_a_model_brings() -> None:
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert len(files) > 100
    found = {(file, use) for file, text in files.items() for use in uses(ast.parse(text))}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "text",
    [
        "eval(x)",
        "exec(compile(x, '', 'exec'))",
        "import pickle",
        "from dill import loads",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "numpy.load(x, allow_pickle=True)",
        "AutoConfig.from_pretrained(x, trust_remote_code=True)",
        "AutoConfig.from_pretrained(x, trust_remote_code=args.trust)",
        "subprocess.run(x, shell=True)",
        "def f():\n    import os\n    os.system(x)",
    ],
)
def test_a_forbidden_use_is_found(text: str) -> None:
    assert list(uses(ast.parse(text)))


def test_an_allowed_one_is_not() -> None:
    text = "torch.load(x, weights_only=True)\nre.compile(x)\nf(trust_remote_code=False)\njson.loads(x)"
    assert not list(uses(ast.parse(text)))
