"""SGLang's load tools resolve server arguments as a server does, in a process that never loaded plugins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_dflash.pairs import target_path

pytestmark = pytest.mark.sglang

pytest.importorskip("sglang")

RESOLVE = """
import argparse, sys
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = ServerArgs.from_cli_args(parser.parse_args(["--model-path", sys.argv[1]]))
args.resolve_once()
print(resolving_view(args).attention_backend)
"""


def resolve(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, str(target_path("tiny-hybrid"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )


def test_the_cpu_platforms_choices_are_made_without_load_plugins() -> None:
    done = resolve()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "torch_dflash"


def test_a_platform_without_its_plugin_is_still_refused() -> None:
    done = resolve(SGLANG_PLUGINS="dflash_cpu")
    assert done.returncode == 1
    assert "replacements are not in place" in done.stderr
