"""Whether the drafter's probabilities need calibrating before blocks are cut by them: ``python -m measure.confidence``.

Offline, with a tiny pair in PyTorch. Prompts are split in two halves; what is fitted is fitted on one and judged on the
other, both ways round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

import torch
import typer
from torch import Tensor

from measure.confidence_blocks import BLOCK, Blocks, answers, blocks, encode
from measure.confidence_scores import Cutter, Estimate, Load, Route, fit_of, logistic, product, with_temperature
from sglang_dflash.bench.provenance import describe_hardware, hardware
from sglang_dflash.bench.tables import Table
from sglang_dflash.bench.tasks import load
from sglang_dflash.bench.tasks.pair_tasks import QUESTIONS
from sglang_dflash.bench.tasks.wild import WILD
from sglang_dflash.pairs import drafter_path, target_path
from sglang_dflash.train.drafter import Drafter
from sglang_dflash.train.hf import load_model, load_tokenizer

OWN = "own"
TASKS = {OWN: QUESTIONS, WILD: WILD}
TEMPERATURES = {"greedy": 0.0, "T = 1": 1.0}
WIDTHS = (1, 2, 4, 8, BLOCK)
PRODUCT, TEMPERATURE, LOGISTIC, FOREIGN = "product", "temperature", "logistic", "from own"
RESAMPLES = 400

Cell = tuple[str, str]  # drafter, task
Texts = dict[str, list[Blocks]]  # by temperature
Estimates = dict[str, list[Tensor]]  # by method, per text


def collect(pair: str, drafters: Sequence[str], prompts: int, new_tokens: int) -> dict[Cell, Texts]:
    """The blocks of every text."""
    tokenizer, target = load_tokenizer(target_path(pair)), load_model(target_path(pair))
    loaded = [Drafter.load(drafter_path(pair, kind)) for kind in drafters]
    cells: dict[Cell, Texts] = {(kind, task): {how: [] for how in TEMPERATURES} for kind in drafters for task in TASKS}
    for task, name in TASKS.items():
        ids = [encode(tokenizer, question) for question in load(name, prompts)]
        for how, temperature in TEMPERATURES.items():
            for prompt, answer in zip(ids, answers(target, ids, temperature, new_tokens), strict=True):
                if len(answer) > 1:
                    for kind, found in zip(drafters, blocks(target, loaded, prompt, answer), strict=True):
                        cells[kind, task][how].append(found)
    return cells


def estimates(texts: Sequence[Blocks], foreign: Sequence[Blocks] | None) -> Estimates:
    """What each method says of every text; ``foreign`` are texts of other traffic to fit on."""
    found = {PRODUCT: [product(text) for text in texts]}
    found[TEMPERATURE], found[LOGISTIC] = held_out(with_temperature, texts), held_out(logistic, texts)
    if foreign is not None:
        estimate = logistic(Blocks.joined(foreign))
        found[FOREIGN] = [estimate(text) for text in texts]
    return found


def held_out(fit: Callable[[Blocks], Estimate], texts: Sequence[Blocks]) -> list[Tensor]:
    """Texts of even number, by the fit on those of odd number, and the other way round."""
    by_half = [fit(Blocks.joined(texts[1 - half :: 2])) for half in (0, 1)]
    return [by_half[i % 2](text) for i, text in enumerate(texts)]


def fit_row(texts: Texts, said: dict[str, Estimates]) -> list[str]:
    """Accept length of the full block, then each score of all methods; for every temperature."""
    fits = {how: [fit_of(torch.cat(each), Blocks.joined(texts[how])) for each in said[how].values()] for how in texts}
    whole = [Cutter(texts[how], said[how][PRODUCT], BLOCK).route(0.0) for how in texts]
    columns = [list(zip(*fits[how], strict=True))[score] for score in range(3) for how in texts]
    return [_joined(map(accept_length, whole), 1), *(_joined(column, 3) for column in columns)]


def accept_length(route: Route) -> float:
    return sum(each.tokens for each in route.walks) / sum(each.steps for each in route.walks)


def cut_cell(texts: Sequence[Blocks], said: Estimates, machine: Load, widths: Sequence[int]) -> str:
    """Tokens per time, each at its best of the widths: whole blocks, then cut by each method; see the page for more."""
    cutters = {name: [Cutter(texts, each, width) for width in widths] for name, each in said.items()}

    def best(name: str, way: Callable[[Cutter], Route]) -> Route:
        return max(map(way, cutters[name]), key=machine.rate)

    whole, swept = best(PRODUCT, lambda cutter: cutter.route(0.0)), best(PRODUCT, lambda cutter: cutter.swept(machine))
    ruled = {name: best(name, lambda cutter: cutter.by_rule(machine)) for name in said}
    gain, error = compare(machine, ruled[LOGISTIC], ruled[PRODUCT])
    rates = _joined(map(machine.rate, ruled.values()), 2)
    return f"{machine.rate(whole):.2f} → {rates} ({machine.rate(swept):.2f}): {gain:+.1%} ± {error:.1%}"


def uncut_width(texts: Sequence[Blocks], said: Estimates, machine: Load) -> int:
    """The width that brings most if nothing is cut."""
    return max(WIDTHS, key=lambda width: machine.rate(Cutter(texts, said[PRODUCT], width).route(0.0)))


def gain(texts: Sequence[Blocks], said: Estimates, machine: Load, width: int) -> float:
    """Of the logistic over the product."""
    ours, theirs = (machine.rate(Cutter(texts, said[name], width).by_rule(machine)) for name in (LOGISTIC, PRODUCT))
    return ours / theirs - 1


def compare(machine: Load, ours: Route, theirs: Route) -> tuple[float, float]:
    """Gain of one way through the same texts over another, and its standard error (bootstrap over texts)."""
    generator, n = torch.Generator().manual_seed(0), len(ours.walks)
    draws = [list(range(n)), *torch.randint(n, (RESAMPLES, n), generator=generator).tolist()]

    def rate(route: Route, draw: list[int]) -> float:
        return machine.rate(Route(route.width, [route.walks[i] for i in draw]))

    gains = [rate(ours, draw) / rate(theirs, draw) - 1 for draw in draws]
    return gains[0], float(torch.tensor(gains[1:]).std())


def report(cells: dict[Cell, Texts], machines: Sequence[Load]) -> Iterator[str]:
    """Fits, for each temperature; cuts, of the texts of all temperatures together."""
    fits: list[list[str]] = []
    cuts: list[list[str]] = []
    gains: list[str] = []
    for (kind, task), texts in cells.items():
        foreign = None if task == OWN else cells[kind, OWN]
        by_how = {how: estimates(found, foreign[how] if foreign else None) for how, found in texts.items()}
        fits.append([kind, task, *fit_row(texts, by_how)])
        every = [text for found in texts.values() for text in found]
        methods = by_how[next(iter(texts))]
        said = {name: [each for found in by_how.values() for each in found[name]] for name in methods}
        for name, widths in ((str(BLOCK), (BLOCK,)), ("best", WIDTHS)):
            cuts.append([kind, task, name, *(cut_cell(every, said, machine, widths) for machine in machines)])
        found = [gain(every, said, machine, uncut_width(every, said, machine)) for machine in machines]
        gains.append(f"{kind} {task} " + " / ".join(f"{share:+.1%}" for share in found))
    scores = [f"{score}, {how}" for score in ("log loss", "Brier", "calibration error") for how in TEMPERATURES]
    yield Table("Fit", "", ["drafter", "tasks", "accept length", *scores], fits).markdown() + "\n"
    columns = ["drafter", "tasks", "block", *(f"R = {machine.ratio:g}" for machine in machines)]
    yield Table("Cut", "", columns, cuts).markdown() + "\n"
    yield f"Logistic over product at the width that is best uncut: {', '.join(gains)}"


def _joined(values: Iterable[float], digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def main(
    pair: str = "tiny-hybrid",
    drafters: Annotated[str, typer.Option(help="Of the pair.")] = "good,noisy,weak,mismatched",
    prompts: Annotated[int, typer.Option(help="Of each kind of traffic.")] = 40,
    new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 64,
    ratios: Annotated[str, typer.Option(help="Time of verifying 16 positions over that of 1.")] = "1.5,2.5,4",
) -> None:
    """Print how well each estimate fits, and what a cut by it brings."""
    torch.set_num_threads(1)
    typer.echo(describe_hardware(hardware()))
    cells = collect(pair, drafters.split(","), prompts, new_tokens)
    for line in report(cells, [Load(float(ratio)) for ratio in ratios.split(",")]):
        typer.echo(line)


if __name__ == "__main__":
    typer.run(main)
