"""Commands for people. No server imports them."""

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_dflash.errors import DFlashError


@contextmanager
def user_errors() -> Iterator[None]:
    import typer

    try:
        yield
    except DFlashError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
