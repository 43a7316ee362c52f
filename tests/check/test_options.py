"""The preflight parses server flags by itself: they are SGLang's, with SGLang's defaults."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest

from sglang_dflash.check import flags

pytestmark = pytest.mark.sglang

pytest.importorskip("sglang")


@pytest.fixture(scope="module")
def upstream() -> ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.mark.parametrize("flag", [*flags.VALUED, *flags.SWITCHES])
def test_a_flag_is_sglangs(flag: str, upstream: ArgumentParser) -> None:
    action = upstream._option_string_actions[flag]
    assert action.dest == flag.removeprefix("--").replace("-", "_")
    default = flags.VALUED[flag][1] if flag in flags.VALUED else False
    assert action.default == default
    for alias in flags.ALIASES.get(flag, []):
        assert getattr(upstream.parse_args(["--model-path", "x", alias, "2"]), action.dest) == 2
