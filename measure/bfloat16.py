"""How DFLASH's greedy text differs from plain decoding's in bfloat16: ``python -m measure.bfloat16``.

One server per pair and arm answers the same prompts; ``measure.bfloat16_table`` compares what they wrote. Finished
texts are JSON lines in a folder, and the same command goes on where it was interrupted.

Besides the arms, three views of plain decoding's own text, so that a first difference can be judged: written again at
another concurrency, scored by a prefill of the same server, and scored in float32 by transformers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer

from sglang_dflash.bench.options import Options
from sglang_dflash.bench.provenance import describe_hardware, hardware
from sglang_dflash.bench.server import Launch, running
from sglang_dflash.bench.settings import configure
from sglang_dflash.pairs import NAMES, target_path

ARMS = "ar,dflash:16,dflash:8,dflash:4,builtin:16"
TOP = 8  # most likely tokens recorded at every position
CONCURRENCY, OTHER_CONCURRENCY = 8, 5
PEERS = Path(__file__).with_name("peers")


HELD_OUT, RANDOM = "held-out", "random"  # names of prompts begin with these


@dataclass(frozen=True)
class Text:
    """One line of a file.

    Attributes:
        prompt: name of its prompt.
        tokens: new tokens.
        tops: before each of them, the ``TOP`` most likely tokens with their log-probability, or with their logit in the
            file of the reference.
        blocks: verified blocks; 0 without speculation.
    """

    prompt: str
    tokens: list[int]
    tops: list[list[tuple[int, float]]]
    blocks: int = 0


def file_of(folder: Path, pair: str, dtype: str, name: str) -> Path:
    """The texts of an arm, or of a view of plain decoding's: ``ar again``, ``prefill`` or ``reference``."""
    return folder / f"{pair} {dtype} {name}.jsonl"


Prompts = dict[str, list[int]]


class Lines:
    """The texts of one file, by prompt."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.texts = {text.prompt: text for text in (Text(**json.loads(line)) for line in lines)}

    def add(self, text: Text) -> None:
        self.texts[text.prompt] = text
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(text)) + "\n")


def missing(lines: Lines, asked: Prompts) -> list[str]:
    return [name for name in asked if name not in lines.texts]


def named_prompts(pair: str, number: int, random: int) -> Prompts:
    """Token ids by name: held-out conversations of all tasks in turn, and ids in no order, which no target is sure of.

    Larger numbers add prompts and change none.
    """
    import transformers

    from sglang_dflash.pairs.corpus.prompts import TASKS, prompts

    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path(pair))
    per_task = [prompts(task, n=-(-number // len(TASKS))) for task in TASKS]
    asked = [prompt for turn in zip(*per_task, strict=True) for prompt in turn][:number]
    rendered = (
        tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
        for prompt in asked
    )
    rng, vocab = Random(0), json.loads((target_path(pair) / "config.json").read_text())["vocab_size"]
    named = {f"{HELD_OUT} {i}": ids for i, ids in enumerate(rendered)}
    return named | {f"{RANDOM} {i}": [rng.randrange(vocab) for _ in range(24)] for i in range(random)}


def launch(pair: str, arm: str, dtype: str) -> Launch:
    # A tiny pair asks for float32; of two --dtype, the last one counts.
    arguments = f"--skip-tokenizer-init --dtype {dtype}"
    settings = configure(
        Options(
            pair=pair, modes=arm, concurrency=str(CONCURRENCY), builtin_shims=PEERS.resolve(), server_args=arguments
        )
    )
    return settings.launch(settings.modes[0])


class Server:
    """Requests to one server, a given number of them at a time; every answer is written down at once."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def write(self, asked: Prompts, lines: Lines, concurrency: int, new_tokens: int) -> None:
        """Greedy text for every prompt that has none in ``lines``."""

        async def one(name: str, http: httpx.AsyncClient) -> None:
            sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": name.startswith(RANDOM)}
            answer = await _generate(http, asked[name], sampling_params=sampling)
            meta = answer["meta_info"]
            tops = _tops(meta["output_top_logprobs"])
            lines.add(Text(name, answer["output_ids"], tops, meta.get("spec_verify_ct", 0)))

        await self._all(one, missing(lines, asked), concurrency)

    async def score(self, asked: Prompts, written: Lines, lines: Lines) -> None:
        """The top tokens before each token of the ``written`` texts, all positions in one prefill."""

        async def one(name: str, http: httpx.AsyncClient) -> None:
            ids, tokens = asked[name], written.texts[name].tokens
            answer = await _generate(
                http, [*ids, *tokens], sampling_params={"max_new_tokens": 1}, logprob_start_len=len(ids) - 1
            )
            # The first entry belongs to the last token of the prompt.
            lines.add(Text(name, tokens, _tops(answer["meta_info"]["input_top_logprobs"][1:])))

        await self._all(one, missing(lines, asked), CONCURRENCY)

    async def _all(self, one: Callable[..., Awaitable[None]], names: Sequence[str], concurrency: int) -> None:
        """Await ``one`` for every name, after emptying the prefix cache."""
        limit = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(base_url=self._url, timeout=3600, trust_env=False) as http:
            (await http.post("/flush_cache", params={"timeout": 30})).raise_for_status()

            async def limited(name: str) -> None:
                async with limit:
                    await one(name, http)

            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(limited(name))


async def _generate(http: httpx.AsyncClient, ids: list[int], **body: Any) -> dict[str, Any]:
    reply = await http.post(
        "/generate", json={"input_ids": ids, "return_logprob": True, "top_logprobs_num": TOP, **body}
    )
    reply.raise_for_status()
    return dict(reply.json())


def _tops(found: list[list[list[Any]]]) -> list[list[tuple[int, float]]]:
    return [[(token, value) for value, token, *_ in position] for position in found]


def reference(pair: str, asked: Prompts, written: Lines, lines: Lines) -> None:
    """The float32 logits of the target in transformers before each token of the ``written`` texts."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target_path(pair), dtype=torch.float32).eval()
    for name in missing(lines, asked):
        ids, tokens = asked[name], written.texts[name].tokens
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *tokens[:-1]]]), logits_to_keep=len(tokens)).logits[0]
        values, indices = (part.tolist() for part in logits.topk(TOP))
        lines.add(Text(name, tokens, [list(zip(*each, strict=True)) for each in zip(indices, values, strict=True)]))


async def measure(pair: str, arm: str, dtype: str, folder: Path, asked: Prompts, new_tokens: int) -> None:
    """Write what is missing of one arm; nothing is started if nothing is."""

    def lines(name: str) -> Lines:
        return Lines(file_of(folder, pair, dtype, name))

    written, again, prefill = lines(arm), lines("ar again"), lines("prefill")
    views = [written, again, prefill] if (arm, dtype) == ("ar", "bfloat16") else [written]
    if any(missing(view, asked) for view in views):
        log = folder / f"{pair} {dtype} {arm}.log"
        async with running(launch(pair, arm, dtype), log) as url:
            server = Server(url)
            await server.write(asked, written, CONCURRENCY, new_tokens)
            if again in views:
                await server.score(asked, written, prefill)
                await server.write(asked, again, OTHER_CONCURRENCY, new_tokens)
    if prefill in views:
        reference(pair, asked, written, lines("reference"))


def main(
    pairs: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(NAMES),
    arms: Annotated[str, typer.Option(help="As for sglang-dflash bench; ar comes first.")] = ARMS,
    dtypes: Annotated[str, typer.Option(help="Comma-separated.")] = "bfloat16,float32",
    prompts: Annotated[int, typer.Option(help="Held-out conversations.")] = 200,
    random: Annotated[int, typer.Option(help="Prompts of random tokens.")] = 48,
    new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    out: Annotated[Path, typer.Option(help="Folder of the texts.")] = Path("results/bfloat16"),
) -> None:
    """Measure what the folder lacks."""
    out.mkdir(parents=True, exist_ok=True)
    for pair in pairs.split(","):
        asked = named_prompts(pair, prompts, random)
        for dtype in dtypes.split(","):
            for arm in arms.split(","):
                asyncio.run(measure(pair, arm, dtype, out, asked, new_tokens))
    typer.echo(describe_hardware(hardware()))


if __name__ == "__main__":
    typer.run(main)
