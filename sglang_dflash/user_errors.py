"""Report a user's error as one message, from every command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from sglang_dflash.errors import DFlashError


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a user's error as one message without a traceback, and exit with status 2."""
    try:
        yield
    except DFlashError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
