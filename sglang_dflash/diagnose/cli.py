"""``sglang-dflash diagnose``: read the options, diagnose, print.

Import what the command needs when it runs: ``sglang-dflash --help`` stays fast.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dflash.errors import DFlashError
from sglang_dflash.user_errors import user_errors

if TYPE_CHECKING:
    from sglang_dflash.diagnose.report import Report


def diagnose(
    url: Annotated[str, typer.Argument(help="The server, for example http://127.0.0.1:30000.")],
    api_key: Annotated[str | None, typer.Option(help="What its --api-key is.")] = None,
    max_tokens: Annotated[int, typer.Option(min=16, help="Longest answer.")] = 128,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the long prompts, about.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """What does drafting bring on a running server, and why does it bring too little?

    Asks the server what it is, and 36 short questions. Exit status: 0 all well, 1 something is wrong (the verdict says
    what to change), 2 nothing there that can be diagnosed.
    """
    with user_errors():
        report = asyncio.run(_ask(url if "://" in url else f"http://{url}", api_key, max_tokens, context))
        if as_json:
            typer.echo(json.dumps(report.as_json(), indent=2))
        else:
            from sglang_dflash.diagnose.tables import wide_console

            for table in report.tables():
                table.print(wide_console())
            typer.echo("\n".join(report.verdict or ["Nothing wrong was found."]))
    raise typer.Exit(1 if report.verdict else 0)


async def _ask(url: str, api_key: str | None, max_tokens: int, context: int) -> Report:
    import httpx

    from sglang_dflash.diagnose import session
    from sglang_dflash.diagnose.client import Client

    async with Client(url, api_key=api_key) as client:
        try:
            return await session.diagnose(client, max_tokens, context, lambda line: typer.echo(line, err=True))
        except (httpx.TransportError, json.JSONDecodeError) as error:
            raise DFlashError(
                f"no SGLang server answers at {url} ({str(error) or type(error).__name__})",
                expected="a running SGLang server",
                remedy="check host and port, and that its log says that it is ready",
            ) from error
