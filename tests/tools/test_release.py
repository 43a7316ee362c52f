"""A release is installed beside and looked at in its own process: here a small one, made for the test."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tools.contract import needs, release, tree
from tools.contract.__main__ import seen
from tools.contract.probe import Need, Seen, code_of

FILES = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/spec.py": '''
WIDTHS = [1, 2]

def verify(block, width=4):
    """Documented."""
    return block

class Batch:
    lens: int
    def __init__(self):
        self.reqs = []
''',
    "sglang/srt/half.py": "import package_that_is_not_installed\n",
    "sglang/srt/lost.py": "from sglang.srt.gone import something\n",
    "sglang/srt/on_gpu.py": "if cuda():\n    from kernels import top_k\nREGISTRY = load()\n",
    "sglang-9.8.7.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: sglang\nVersion: 9.8.7\n"
        "Requires-Dist: packaging<1\nRequires-Dist: pytest\nRequires-Dist: not-installed==1\n"
        "Requires-Dist: ruff<0.0.1; extra == 'dev'\n"
    ),
    "sglang-9.8.7.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "sglang-9.8.7.dist-info/RECORD": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release, installed by the tool from an index that is a folder."""
    index = tmp_path_factory.mktemp("index")
    with zipfile.ZipFile(index / "sglang-9.8.7-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            wheel.writestr(name, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index))
        installed = release.install("9.8.7", tmp_path_factory.mktemp("releases"))
        with pytest.raises(SystemExit, match="sglang==9.9.9 could not be installed beside"):
            release.install("9.9.9", installed.parent)
    assert [path.name for path in installed.parent.iterdir()] == ["9.8.7"]
    return installed


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    wanted = [
        Need("sglang.srt.spec.verify", ("block",)),
        Need("sglang.srt.spec.verify.no_such_attribute"),
        Need("sglang.srt.spec.WIDTHS"),
        Need("sglang.srt.spec.gone"),
        Need("sglang.srt.gone.name"),
        Need("sglang.srt.half.name"),
        Need("sglang.srt.lost.name"),
        Need("sglang.srt.spec.Batch", by_attribute=True),
        Need("sglang.srt.on_gpu.top_k", text_only=True),
        Need("sglang.srt.on_gpu.REGISTRY", text_only=True),
        Need("sglang.srt.on_gpu.gone", text_only=True),
        Need("sglang.srt.no_file.gone", text_only=True),
    ]
    scratch = tmp_path_factory.mktemp("scratch")
    (scratch / "needs.json").write_text(json.dumps([asdict(need) for need in wanted]))
    assert release.run("tools.contract.probe", scratch / "needs.json", scratch / "seen.json", folder=folder) is None
    assert json.loads((scratch / "seen.json").read_text())["sglang"] == str(folder / "sglang/__init__.py")
    return seen(scratch / "seen.json")


def test_what_is_there_has_parameters_and_code(found: dict[str, Seen]) -> None:
    verify = found["sglang.srt.spec.verify"]
    assert (verify.problem, verify.parameters, verify.required) == (None, ("block", "width"), ("block",))
    assert verify.code
    assert found["sglang.srt.spec.WIDTHS"].code


@pytest.mark.parametrize(
    "path", ["spec.gone", "gone.name", "lost.name", "spec.verify.no_such_attribute", "on_gpu.gone", "no_file.gone"]
)
def test_what_is_gone_is_gone_for_sglangs_reasons(path: str, found: dict[str, Seen]) -> None:
    gone = found[f"sglang.srt.{path}"]
    assert str(gone.problem).startswith(f"sglang.srt.{path}: not found")
    assert gone.unimportable is None


def test_a_package_that_is_missing_here_is_not_held_against_the_release(found: dict[str, Seen]) -> None:
    assert "package_that_is_not_installed" in str(found["sglang.srt.half.name"].unimportable)


def test_text_is_enough_where_an_import_would_need_a_device(found: dict[str, Seen]) -> None:
    assert found["sglang.srt.on_gpu.top_k"].problem is found["sglang.srt.on_gpu.REGISTRY"].problem is None


def test_attributes_are_declared_or_assigned(found: dict[str, Seen]) -> None:
    assert {"lens", "reqs"} <= set(found["sglang.srt.spec.Batch"].attributes)


def test_a_docstring_is_no_code() -> None:
    def one() -> int:
        """One."""
        return 1

    first = code_of(one)

    def one() -> int:  # type: ignore[no-redef]
        return 1  # a comment

    assert first is not None
    assert code_of(one) == first

    def one() -> int:  # type: ignore[no-redef]
        return 2

    assert code_of(one) != first


def test_a_release_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("raise RuntimeError('too old')\n")
    (tmp_path / "needs.json").write_text("[]")
    failed = release.run("tools.contract.probe", tmp_path / "needs.json", tmp_path / "seen.json", folder=tmp_path)
    assert failed == "RuntimeError: too old"


def test_packages_that_a_release_wants_otherwise(folder: Path) -> None:
    asked = release.wishes(Distribution.at(folder / "sglang-9.8.7.dist-info"))
    assert list(asked) == ["packaging"]
    assert asked["packaging"][1] == "<1"


def test_a_users_own_switches_do_not_reach_the_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    bare, whole = (release.environment(tmp_path, plugins=plugins) for plugins in (False, True))
    assert "SGLANG_PLATFORM" not in bare | whole
    assert (bare["SGLANG_PLUGINS"], "SGLANG_PLUGINS" in whole) == ("none", False)
    assert bare["PYTHONPATH"].startswith(f"{tmp_path}:")


def test_where_a_name_went(folder: Path) -> None:
    assert tree.places_of("verify", folder) == tree.places_of("WIDTHS", folder) == ["sglang.srt.spec"]
    assert tree.places_of("reqs", folder) == []


def test_patches_that_do_not_apply_are_named(folder: Path) -> None:
    refused = tree.refused_patches(folder)
    assert len(refused) == len(list(tree.PATCHES.glob("[0-9]*.patch")))
    assert refused[0].startswith("0001-worker: ")


def test_what_a_name_is_needed_for_is_its_users_own_first_line() -> None:
    users = needs.users_of_names()
    assert users["alloc_for_spec_decode"].startswith("worker/")
    assert "(and 1 more)" in users["GenerationBatchResult"]
    assert all(line.partition(": ")[2] for line in users.values())


def test_types_of_annotations_are_read_from_the_seam() -> None:
    text = "import json\nif TYPE_CHECKING:\n    from sglang.srt.a import B as B\nfrom other import C\n"
    assert list(needs.annotations(text)) == ["sglang.srt.a.B"]
