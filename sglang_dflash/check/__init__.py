"""For people, never imported by a server: what a start would do (check), who would serve (doctor), what a server gains
(diagnose). It predicts with the server's own plan and policies."""

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_dflash.errors import DFlashError


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a DFlashError as one message without a traceback, and exit with status 2."""
    import typer

    try:
        yield
    except DFlashError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
