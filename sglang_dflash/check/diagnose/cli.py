"""The command ``sglang-dflash diagnose``. It imports inside functions, so that ``sglang-dflash --help`` is fast."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dflash.errors import user_errors

if TYPE_CHECKING:
    from sglang_dflash.check.diagnose.verdict import Report


def diagnose(
    url: Annotated[str, typer.Argument(help="The server, for example http://127.0.0.1:30000.")],
    api_key: Annotated[str | None, typer.Option(help="API key of the server.")] = None,
    max_tokens: Annotated[int, typer.Option(min=16, help="Maximum tokens per answer.")] = 128,
    context: Annotated[int, typer.Option(min=1, help="Approximate length of the long prompts, in tokens.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Diagnose a running DFLASH server: how much does drafting help, and what limits it?

    Reads the server's state and sends it 36 short prompts. Exit status: 0 nothing found, 1 something is wrong (the
    verdict says what to change), 2 no DFLASH server at this address.

    Example: sglang-dflash diagnose http://127.0.0.1:30000
    """
    with user_errors():
        report = asyncio.run(_measure(url, api_key, max_tokens, context))
        typer.echo(json.dumps(report.as_json(), indent=2) if as_json else str(report))
    raise typer.Exit(1 if report.verdict else 0)


async def _measure(url: str, api_key: str | None, max_tokens: int, context: int) -> Report:
    from sglang_dflash.check.diagnose.client import Client
    from sglang_dflash.check.diagnose.verdict import diagnose

    async with Client(url, api_key) as client:
        return await diagnose(client, max_tokens, context, lambda line: typer.echo(line, err=True))
