"""Documents name only what exists: links, paths, modules, ``make`` targets, commands and environment variables."""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from sglang_router.router_args import RouterArgs

from sglang_dflash.check.cli import app
from sglang_dflash.check.flags import sglang_parser
from sglang_dflash.hooks.flags import RENAMED
from sglang_dflash.plan.plan import PROVEN

ROOT = Path(__file__).parents[2]
READMES = [folder / "README.md" for folder in (ROOT, ROOT / "patches", ROOT / "cpu_platform", ROOT / "lab")]
TOP = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *READMES]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = "sglang_dflash|cpu_platform|lab|tests|tools|launch|containers|docs|requirements|patches"
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*]")
VARIABLE = re.compile(r"\bSGLANG_DFLASH\w*")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
GUIDES = sorted((ROOT / "docs").glob("*.md"))
# Pages with commands of other tools; their own flags are those tools'.
FOREIGN = {"benchmarking.md", "development.md"}


def texts() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        yield page, page.read_text()


def mentioned(pattern: str) -> set[str]:
    return {found for _, text in texts() for found in re.findall(pattern, text)}


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not re.search("^(<<<<<<<|>>>>>>>) ", page.read_text(), re.MULTILINE), "an unresolved merge"
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_paths_exist() -> None:
    missing = [(page.name, path) for page, text in texts() for path in PATH.findall(text) if not any(ROOT.glob(path))]
    assert not missing


def test_the_support_matrix_lists_the_proven_kinds_of_targets() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    for kind, (model_types, test) in PROVEN.items():
        names = ", ".join(f"`{name}`" for name in sorted(model_types))
        assert f"| targets: {kind} | {names} | `{test}` |" in page


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert mentioned(r"(?m)(?:^|`)make ([\w-]+)(?=`| +#| +[A-Z_]+=|$)") == targets


def test_variables_are_read() -> None:
    tracked = subprocess.check_output(["git", "ls-files", "*.py", "*.sh"], cwd=ROOT, text=True).split()
    code = {name for file in tracked for name in VARIABLE.findall((ROOT / file).read_text())}
    assert {found for _, text in texts() for found in VARIABLE.findall(text)} <= code


def options(command: click.Command) -> set[str]:
    """Options of a command and of its subcommands."""
    found = {option for parameter in command.params for option in parameter.opts}
    return found.union(*map(options, getattr(command, "commands", {}).values()), {"--help"})


OURS = typer.main.get_command(app)
OF_SERVER = {*sglang_parser()._option_string_actions, *RENAMED}
ROUTER = argparse.ArgumentParser()
RouterArgs.add_cli_args(ROUTER)
OF_OTHERS = {flag for script in (ROOT / "launch").glob("*.sh") for flag in FLAG.findall(script.read_text())}
OF_OTHERS |= set(ROUTER._option_string_actions) | {"--gpus", "--prerelease"}  # of docker and uv


@pytest.mark.parametrize("page", [READMES[0], *GUIDES], ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    """Of the server, our commands, the launch scripts and SGLang's router."""
    if page.name not in FOREIGN:
        named = set(re.findall(FLAG.pattern + r"(?![\w-]|\*)", page.read_text()))
        assert named <= OF_SERVER | OF_OTHERS | options(OURS)


def test_commands_take_the_flags_that_pages_show() -> None:
    for _, text in texts():
        for command, rest in re.findall(r"(?m)^\$? ?sglang-dflash ([a-z]\w*)(.*)$", text.replace("\\\n", " ")):
            known = options(OURS.commands[command]) | (OF_SERVER if command == "check" else set())
            assert set(FLAG.findall(rest.partition("#")[0].partition('"')[0])) <= known, rest
        for rest in re.findall(r"(?m)^python -m sglang.launch_server (.*)$", text.replace("\\\n", " ")):
            assert set(FLAG.findall(re.sub(r"\$\([^)]*\)", "", rest))) <= OF_SERVER, rest


@pytest.mark.parametrize("page", sorted((ROOT / "docs/results").glob("*.md")), ids=lambda page: page.name)
def test_result_pages_say_how_each_table_is_made(page: Path) -> None:
    for before, table in re.findall(r"((?s:.*?))\n((?:\|.*\n)+)", page.read_text()):
        if page.name != "README.md":
            assert "```bash" in before or "<!-- measure:" in before, table


MODULES = sorted(
    module
    for module in {
        found for page in [*PAGES, ROOT / "Makefile"] for found in re.findall(r"python -m ([\w.]+)", page.read_text())
    }
    if module.partition(".")[0] in ("tests", "tools", "sglang_dflash_cpu", "sglang_dflash_lab")
)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_the_pages_run_prints_its_help_and_does_nothing_else(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runpy, of a module that another test has imported
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code in (None, 0)
    assert "usage: " in capsys.readouterr().out.lower()
