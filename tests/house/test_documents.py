"""Documents are true: links, names, flags, commands, generated tables and versions are those of the code."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from sglang_router.router_args import RouterArgs

from sglang_dflash import __version__
from sglang_dflash.causes import FIXES
from sglang_dflash.check.cli import COMMANDS, app, loaded
from sglang_dflash.check.doctor import TESTED
from sglang_dflash.check.flags import sglang_parser
from sglang_dflash.launch.old_flags import RENAMED
from sglang_dflash.launch.published import drafter_of, parsers_of
from sglang_dflash.launch.settings import flag_of
from sglang_dflash.launch.which_worker import PROVEN
from sglang_dflash.upstream import TESTED_SGLANG
from tests.house import cards
from tests.house.cards import TABLES, row_of, served

ROOT = Path(__file__).parents[2]
README, COMPATIBILITY = ROOT / "README.md", ROOT / "docs/compatibility.md"
RESULTS_GPU = ROOT / "docs/internals/gpu.md"
TROUBLES = ROOT / "docs/troubleshooting.md"
GUIDES = sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs/measured.md"})
MEASURED = ROOT / "docs/measured.md"
RESULTS = [MEASURED, *sorted((ROOT / "docs/internals").glob("*.md"))]
OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "patches/README.md")]
PAGES = [README, *GUIDES, *RESULTS, *OTHERS, ROOT / "lab/README.md", ROOT / "cpu_platform/README.md"]
TEXT = {page: page.read_text() for page in PAGES}
TRACKED = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def text(file: str) -> str:
    return (ROOT / file).read_text()


def mentioned(pattern: str) -> set[str]:
    return {found for page in TEXT.values() for found in re.findall(pattern, page)}


def rows(text: str) -> Iterator[list[str]]:
    """Cells of each table row, without headings."""
    for row in re.findall(r"(?m)^\| (.*) \|$", text):
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]


def section(page: Path, heading: str) -> str:
    """A section without its subsections."""
    return TEXT[page].partition(f"# {heading}\n")[2].partition("\n#")[0]


# Links and names


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(folder: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (folder / file).resolve()
    return target.exists() and (not anchor or anchor in anchors(target))


@each(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    assert not re.search("^(<<<<<<<|>>>>>>>) ", TEXT[page], re.MULTILINE), "an unresolved merge"
    links = re.findall(r"\]\(([^)\s:]+)\)", TEXT[page])
    links = [f"{page.name}{link}" if link.startswith("#") else link for link in links]
    assert not [link for link in links if not leads_somewhere(page.parent, link)]


def test_pages_and_sections_that_the_code_names_exist() -> None:
    pattern = re.compile(r"(?<![\w./-])((?:docs|lab|cpu_platform)/[\w/-]+\.md(?:#[\w-]+)?)")
    ends = (".py", ".sh", ".txt", "Makefile", ".toml")
    files = [file for file in TRACKED if file.endswith(ends) or "Dockerfile" in file]
    named = {name for file in files for name in pattern.findall(text(file))}
    generated = {"docs/internals/gpu.md"}  # written by `make gpu`
    assert len(named) > 10 and not [name for name in named - generated if not leads_somewhere(ROOT, name)]


def test_paths_exist() -> None:
    folders = "sglang_dflash|cpu_platform|lab|tests|tools|launch|containers|docs|requirements|patches"
    named = mentioned(rf"(?<![\w./-])(?:{folders})/[\w./*-]*[\w*]")
    assert not [path for path in named if not any(ROOT.glob(path))]


def test_variables_are_read() -> None:
    variable = re.compile(r"\bSGLANG_DFLASH\w*")
    code = {name for file in TRACKED if file.endswith((".py", ".sh")) for name in variable.findall(text(file))}
    assert mentioned(variable.pattern) <= code


def test_make_targets_are_documented_and_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))
    workflows = "".join(text(file) for file in TRACKED if file.startswith(".github/workflows/"))
    assert {"setup", "drift", "dist"} <= set(re.findall(r"\bmake ([\w-]+)", workflows)) <= targets
    assert mentioned(r"(?m)(?:^|`)make ([\w-]+)(?=`| +#| +[A-Z_]+=|$)") == targets


def test_the_table_of_targets_lists_the_proven_kinds() -> None:
    table = rows(section(COMPATIBILITY, "Targets"))
    for kind, proof in PROVEN.items():
        types_and_tests = proof.tests, {*proof.tests.values()}
        assert [kind, *(", ".join(f"`{name}`" for name in sorted(each)) for each in types_and_tests)] in table


def test_the_table_of_causes_is_the_codes() -> None:
    assert list(rows(section(TROUBLES, "Causes")))[1:] == [list(item) for item in FIXES.items()]
    for cause, fix in re.findall(r"Likely cause: (.*?)\. Fix: (.*)\.", TEXT[TROUBLES]):
        assert FIXES[cause] == fix


def test_the_books_stay_short() -> None:
    prose = re.sub(r"(?m)^\|.*\n|```(?s:.*?)```", "", TEXT[README])
    assert len(prose.split()) <= 900 and len(prose.splitlines()) <= 140
    manual = [page for page in GUIDES if page.name not in ("how-it-works.md", "development.md")]
    assert sum(len(TEXT[page].split()) for page in manual) <= 9_050
    assert sum(len(TEXT[page].split()) for page in RESULTS if page not in (MEASURED, RESULTS_GPU)) <= 4_000


# Flags and commands


def options(command: click.Command) -> set[str]:
    """Options of a command and of its subcommands."""
    found = {option for parameter in command.params for option in parameter.opts}
    return found.union(*map(options, getattr(command, "commands", {}).values()), {"--help"})


OURS = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
OURS |= {name: typer.main.get_command(loaded(point)) for name, point in COMMANDS.items()}
OF_SERVER = {*sglang_parser()._option_string_actions, *RENAMED}
ROUTER = argparse.ArgumentParser()
RouterArgs.add_cli_args(ROUTER)
OF_OTHERS = {flag for script in (ROOT / "launch").glob("*.sh") for flag in FLAG.findall(script.read_text())}
OF_OTHERS |= set(ROUTER._option_string_actions) | {"--gpus", "--prerelease", "--ratio"}  # of docker, uv and the lab


@each([README, *(page for page in GUIDES if page.name != "benchmark.md")])
def test_flags_exist(page: Path) -> None:
    """Of the server, our commands, the launch scripts and SGLang's router."""
    named = set(re.findall(FLAG.pattern + r"(?![\w-]|\*)", TEXT[page]))
    assert named <= OF_SERVER | OF_OTHERS.union(*map(options, OURS.values()))


def shown(page: Path, command: str) -> list[str]:
    """The rest of each line of a page that begins with a command, without the comment behind it."""
    return re.findall(rf"(?m)^\$? ?{command} (.*?)(?: +#.*)?$", TEXT[page].replace("\\\n", " "))


@each(PAGES)
def test_commands_take_the_flags_that_a_page_shows(page: Path) -> None:
    for rest in shown(page, "sglang-dflash"):
        command = rest.split()[0]
        known = options(OURS[command]) | (OF_SERVER if command == "check" else set())
        assert set(FLAG.findall(rest.partition('"')[0])) <= known, rest
    for rest in shown(page, "python -m sglang.launch_server"):
        assert set(FLAG.findall(re.sub(r"\$\([^)]*\)", "", rest))) <= OF_SERVER, rest


MODULE = r"python -m ((?:tests|tools|sglang_dflash_cpu|sglang_dflash_lab)\.[\w.]+)"
MODULES = mentioned(MODULE) | set(re.findall(MODULE, text("Makefile")))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_that_a_page_runs_prints_its_help_and_does_nothing_else(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runpy, of a module that another test has imported
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code in (None, 0)
    assert "usage: " in capsys.readouterr().out.lower()


# Predictions of `check`, with configurations of tests/fixtures in place of a pair's hub names


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_the_tables_of_pairs_and_cards_are_what_check_predicts(page: Path) -> None:
    """``python -m tests.house.cards`` writes them."""
    name, table = TABLES[page]
    assert f"<!-- cards: {name} -->\n" + "\n".join(table()) + "\n\n" in TEXT[page]


def test_the_readmes_servers_are_those_that_check_proposes() -> None:
    checks = [rest.split() for rest in shown(README, "sglang-dflash check")]
    servers = [shlex.split(rest) for rest in shown(README, "python -m sglang.launch_server")]
    for (target, drafter, *flags), server in zip(checks, servers, strict=True):
        given = dict(zip(server[::2], server[1::2], strict=True))
        assert given.pop("--model-path") == target and given.pop("--speculative-draft-model-path") == drafter == "auto"
        assert given.pop("--speculative-algorithm") == "DFLASH" and drafter_of(target) == row_of(target).drafter
        added = [word for item in given.items() for word in item]
        parsers = [word for name, value in parsers_of(target).items() for word in (flag_of(name), value)]
        assert [*parsers, *served(row_of(target), *flags)[0].split()] == added
        assert re.search("FITS: [1-9]", cards.printed(*row_of(target).files, *flags, *added)), target


# Pages of results


@each([page for page in RESULTS if page.name != "README.md"])
def test_result_pages_say_how_each_table_is_made(page: Path) -> None:
    for before, table in re.findall(r"((?s:.*?))\n((?:\|.*\n)+)", TEXT[page]):
        assert "```bash" in before or "<!-- measure:" in before, table


# The version, which begins with the SGLang release that the package is for

PROJECT = tomllib.loads(text("pyproject.toml"))["project"]


def test_every_place_names_this_release() -> None:
    assert re.fullmatch(rf"{re.escape(TESTED_SGLANG)}\.[1-9]\d*(rc\d+|\.dev\d+)?", __version__)
    for file, line in {
        "Makefile": "SGLANG_TESTED := sglang=={sglang}\n",
        "tools/wheels.txt": "\nsglang=={sglang} ",
        "README.md": "**stock, released SGLang {sglang}**",
        "docs/compatibility.md": "\n| {ours} | {sglang}; ",
        "docs/internals/drift.md": "\n| {sglang} | 0 |",
        "patches/register-plugin.patch": "SGLang {sglang}\n",
        "CHANGELOG.md": "\n## [{ours}]",
        "containers/Dockerfile": "ARG SGLANG_IMAGE=lmsysorg/sglang:v{sglang}\n",
        "pyproject.toml": '"sglang=={sglang}"',
    }.items():
        assert line.format(sglang=TESTED_SGLANG, ours=__version__) in text(file), file


def test_the_three_distributions_have_one_version_and_need_it() -> None:
    for folder in ("cpu_platform", "lab"):
        settings = tomllib.loads(text(f"{folder}/pyproject.toml"))
        project = settings["project"]
        assert settings["tool"]["distutils"] == tomllib.loads(text("pyproject.toml"))["tool"]["distutils"]
        assert project["version"] == __version__ and f"sglang-dflash=={__version__}" in project["dependencies"]
        assert project["requires-python"] == PROJECT["requires-python"]
        assert text(f"{folder}/LICENSE") == text("LICENSE")
    assert PROJECT["optional-dependencies"]["lab"] == [f"sglang-dflash-lab=={__version__}"]


def test_tested_versions_are_those_of_make_setup_of_the_workflow_and_of_the_page() -> None:
    pins = f"{text('Makefile')}\n{text('requirements/cpu.txt')}"
    pinned = dict(re.findall(r"^(?:\w+ [:?]= )?(sglang|torch|triton)==(\S+)", pins, re.MULTILINE))
    assert {name.lower(): versions[-1] for name, versions in TESTED.items()} == pinned
    assert "TORCH" not in text(".ci/run") and "PYTHON" not in text(".ci/run")  # README's commands
    assert tuple(re.findall(r'"torch==([\d.]+)"', text(".github/workflows/test.yml"))) == TESTED["torch"]
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={declared[0]},<3.{int(declared[-1][2:]) + 1}"
    [pythons] = re.findall(r"python: \[(.*)\]", text(".github/workflows/test.yml"))
    assert re.findall(r'"(3\.\d+)"', pythons) == declared
    [row] = re.findall(rf"^\| {re.escape(__version__)} \|.*$", TEXT[COMPATIBILITY], re.MULTILINE)
    assert re.findall(r"\b3\.\d+", row) == declared and all(version in row for version in TESTED["torch"])
