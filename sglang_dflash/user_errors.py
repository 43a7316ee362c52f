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
        return
    except DFlashError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        message = f"{error}. Fix: run pip install '.[bench]' in a checkout of sglang-dflash"
    typer.echo(message, err=True)
    raise typer.Exit(2)
