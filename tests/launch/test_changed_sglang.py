"""An SGLang that lacks what we call is refused in one message while the server resolves its flags."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.upstream import ALLOW_ANY_VERSION, TESTED_SGLANG
from tests.support.broken_pairs import Broken, write_pair
from tests.support.preloaded import run

pytest.importorskip("sglang")


pytestmark = pytest.mark.sglang

# Plain decoding first, then the whole command line.
RESOLVE = """
import sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
{change}
load_plugins()
prepare_server_args(sys.argv[1:3]).resolve_once()
print("plain decoding is served")
prepare_server_args(sys.argv[1:]).resolve_once()
"""
AS_IT_IS = RESOLVE.format(change="")
CHANGED = RESOLVE.format(change="from sglang.srt.speculative import spec_utils; del spec_utils.GrammarTree")


def resolve(program: str, folder: Path, *, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    write_pair(folder, Broken("fits", ""))
    flags = ("--model-path", str(folder / "target"), "--speculative-algorithm", "DFLASH")
    flags += ("--speculative-draft-model-path", str(folder / "drafter"))
    environment = {name: value for name, value in os.environ.items() if name != ALLOW_ANY_VERSION}
    environment |= {"PYTHONPATH": os.pathsep.join([path, os.getcwd(), *sys.path]), **variables}
    return run("-c", program, *flags, environment=environment)


def call_it(name: str, version: str, folder: Path) -> str:
    """A path on which an installed distribution reports this version, and no entry points."""
    info = folder / f"path/{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(info.parent)


def test_a_name_that_a_scheduler_lacks_is_an_error_of_the_launch_and_plain_decoding_goes_on(tmp_path: Path) -> None:
    """A name that the launch itself lacks: ``tests/house/test_plugin.py``."""
    refused = resolve(CHANGED, tmp_path)
    assert (refused.returncode, refused.stdout.splitlines()[-1]) == (1, "plain decoding is served")
    [message] = [line for line in refused.stderr.splitlines() if "sglang_dflash.errors.DFlashError: " in line]
    assert "cannot import name 'GrammarTree' from 'sglang.srt." in message
    assert f"install sglang=={TESTED_SGLANG}" in message


def test_another_release_is_refused_for_dflash_alone(tmp_path: Path) -> None:
    """Also on the CPU platform, which ``import sglang`` itself loads."""
    path = call_it("sglang", "99.1.0", tmp_path)
    refused = resolve(AS_IT_IS, tmp_path, path=path)
    assert (refused.returncode, refused.stdout.splitlines()[-1]) == (1, "plain decoding is served")
    assert "sglang_dflash.errors.DFlashError: sglang-dflash: SGLang is 99.1.0" in refused.stderr
    assert resolve(AS_IT_IS, tmp_path / "served", path=path, **{ALLOW_ANY_VERSION: "1"}).returncode == 0
