"""``--speculative-adaptive`` for DFLASH: SGLang's flag, which its own resolution would switch off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import declare_resolution, resolving_view
from sglang_dflash.width import asked_for
from sglang_dflash.width.config import FLAG, read_config

if TYPE_CHECKING:
    from sglang_dflash.upstream import ServerArgs


def take_over(server_args: ServerArgs) -> None:
    """Before SGLang resolves speculation: read the configuration, and leave SGLang nothing to switch off.

    SGLang's resolved arguments then say that nothing is adaptive, which is what its runners must believe: they would
    size their graphs by its own candidates. Our worker reads what the user asked for.

    Raises:
        DFlashError: a configuration without the flag, or one that cannot be used.
    """
    args = resolving_view(server_args)
    if not args.speculative_adaptive:
        if args.speculative_adaptive_config is not None:
            raise DFlashError(
                f"{FLAG} {args.speculative_adaptive_config} without --speculative-adaptive",
                expected="both, or neither",
                remedy="add --speculative-adaptive, or leave the file out",
            )
        return
    read_config(args.speculative_adaptive_config)
    declare_resolution(server_args, "sglang_dflash.width", speculative_adaptive=False)


def check_widths(server_args: ServerArgs) -> None:
    """After it: the block is known now.

    Raises:
        DFlashError: a width is wider than the block.
    """
    if (config := asked_for(server_args)) is not None:
        config.widths_for(resolving_view(server_args).speculative_num_draft_tokens)
