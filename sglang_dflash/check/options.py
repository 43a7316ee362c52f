"""The server flags that the preflight reads, by SGLang's names and with its defaults.

Parsed here, not by SGLang, whose parser takes seconds to import. Flags that decide nothing the preflight looks at are
accepted and listed; the server's own parser judges them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang_dflash.check.old_flags import modernise_argv

# flag -> (type, default)
VALUED: dict[str, tuple[type, object]] = {
    "--attention-backend": (str, None),
    "--chat-template": (str, None),
    "--context-length": (int, None),
    "--decode-attention-backend": (str, None),
    "--device": (str, None),
    "--disaggregation-decode-extra-slots": (int, None),
    "--disaggregation-decode-retraction-backup": (str, None),
    "--disaggregation-mode": (str, "null"),
    "--dtype": (str, "auto"),
    "--json-model-override-args": (str, "{}"),
    "--kv-cache-dtype": (str, "auto"),
    "--linear-attn-backend": (str, "triton"),
    "--linear-attn-decode-backend": (str, None),
    "--linear-replayssm-cache-len": (int, 16),
    "--mamba-full-memory-ratio": (float, None),
    "--mamba-radix-cache-strategy": (str, "auto"),
    "--mamba-ssm-dtype": (str, None),
    "--mamba-track-interval": (int, 256),
    "--max-mamba-cache-size": (int, None),
    "--max-running-requests": (int, None),
    "--max-total-tokens": (int, None),
    "--mem-fraction-static": (float, None),
    "--page-size": (int, None),
    "--pp-size": (int, 1),
    "--prefill-attention-backend": (str, None),
    "--revision": (str, None),
    "--speculative-adaptive-config": (str, None),
    "--speculative-dflash-block-size": (int, None),
    "--speculative-draft-attention-backend": (str, None),
    "--speculative-draft-kv-cache-dtype": (str, None),
    "--speculative-draft-model-revision": (str, None),
    "--speculative-draft-window-size": (int, None),
    "--speculative-num-draft-tokens": (int, None),
    "--tp-size": (int, 1),
}
SWITCHES = (
    "--disable-overlap-schedule",
    "--disable-radix-cache",
    "--enable-linear-replayssm",
    "--enable-linear-replayssm-spec",
    "--speculative-adaptive",
    "--trust-remote-code",
)
ALIASES = {"--tp-size": ["--tensor-parallel-size", "--tp"], "--pp-size": ["--pipeline-parallel-size"]}
# Given by the preflight's own arguments; accepted so that a card's command line can be pasted after them.
_GIVEN = ("--model-path", "--model", "--speculative-algorithm", "--speculative-draft-model-path")


def parse(flags: Sequence[str], *, target: str, drafter: str) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Parse a server's flags.

    Returns:
        The arguments by SGLang's names; one line for each old flag that was translated; the flags that were not read.

    Raises:
        DFlashError: an old flag and its new name contradict each other.
        SystemExit: a flag's value has the wrong type (argparse).
    """
    modern, notes = modernise_argv(flags)
    parser = argparse.ArgumentParser(prog="sglang-dflash check", add_help=False, allow_abbrev=False)
    for flag, (kind, default) in VALUED.items():
        parser.add_argument(flag, *ALIASES.get(flag, []), type=kind, default=default)
    for flag in SWITCHES:
        parser.add_argument(flag, action="store_true")
    for flag in _GIVEN:
        parser.add_argument(flag, dest="_given")
    args, unread = parser.parse_known_args(modern)
    for name, value in vars(args).items():
        if value == []:  # argparse's reading of "--flag=--"
            parser.error(f"--{name.replace('_', '-')}: expected one argument")
    args.model_path, args.speculative_draft_model_path, args.speculative_algorithm = target, drafter, "DFLASH"
    return args, notes, [word for word in unread if word.startswith("--")]
