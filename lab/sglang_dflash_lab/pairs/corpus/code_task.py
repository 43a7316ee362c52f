"""Small Python functions over a list of numbers (filter, map, reduce), checked by running them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from random import Random
from textwrap import indent
from typing import Any

from sglang_dflash_lab.pairs.corpus.conversation import Example

# Name part, wording, and condition or value, of filters and of maps.
_FILTERS = (
    ("all", "numbers", ""),
    ("even", "even numbers", "n % 2 == 0"),
    ("odd", "odd numbers", "n % 2 == 1"),
    ("positive", "positive numbers", "n > 0"),
    ("negative", "negative numbers", "n < 0"),
    ("gt{k}", "numbers greater than {k}", "n > {k}"),
    ("lt{k}", "numbers less than {k}", "n < {k}"),
    ("div{k}", "numbers divisible by {k}", "n % {k} == 0"),
)
_MAPS = (
    ("", "", "n"),
    ("squared", "squares of the ", "n * n"),
    ("doubled", "doubles of the ", "n * 2"),
    ("halved", "halves of the ", "n // 2"),
    ("abs", "absolute values of the ", "abs(n)"),
    ("plus{m}", "results of adding {m} to the ", "n + {m}"),
    ("times{m}", "results of multiplying by {m} the ", "n * {m}"),
)
_BEST = "value = {value}\nif best is None or value ? best:\n    best = value"
# Noun, the loop's start and update, one-line form (None for a product).
_REDUCES: dict[str, tuple[str, str, str, str | None]] = {
    "sum": ("sum", "total = 0", "total += {value}", "sum({items})"),
    "count": ("number", "count = 0", "count += 1", "len([{items}])"),
    "max": ("largest", "best = None", _BEST.replace("?", ">"), "max([{items}], default=None)"),
    "min": ("smallest", "best = None", _BEST.replace("?", "<"), "min([{items}], default=None)"),
    "list": ("list", "result = []", "result.append({value})", "[{items}]"),
    "product": ("product", "total = 1", "total *= {value}", None),
}
INPUTS: tuple[list[int], ...] = ([], [1, 2, 3, 4, 5, 6], [-3, 8, 12, 7, -10, 9, 2], [0, 5, 18, -21])
_BUILTINS = {"len": len, "sum": sum, "max": max, "min": min, "abs": abs}
_ALLOWED = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Expr, ast.Constant, ast.Return, ast.Assign,
    ast.AugAssign, ast.For, ast.If, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Name, ast.Load,
    ast.Store, ast.Call, ast.keyword, ast.Attribute, ast.List, ast.ListComp, ast.GeneratorExp,
    ast.comprehension, ast.operator, ast.cmpop, ast.boolop, ast.unaryop,
)  # fmt: skip


def draw(rng: Random) -> Example:
    filter_name, filter_text, condition = rng.choice(_FILTERS)
    map_name, map_text, value = rng.choice(_MAPS)
    reduce = rng.choice(tuple(_REDUCES))
    if reduce == "count":
        map_name, map_text, value = _MAPS[0]
    noun, start, update, one_line = _REDUCES[reduce]
    k, m = rng.randint(2, 9), rng.randint(2, 9)
    condition, value = condition.format(k=k), value.format(m=m)
    name = "_".join(part.format(k=k, m=m) for part in (reduce, filter_name, map_name) if part)
    doc = f"{noun} of the {map_text.format(m=m)}{filter_text.format(k=k)}"
    style = rng.choice(("a loop", "a loop", "one line"))
    head = f'def {name}(nums):\n    """Return the {doc}."""\n'
    question = rng.choice(
        (
            f"Write a Python function `{name}` that returns the {doc}. Use {style}.",
            f"Complete this function using {style}:\n\n{head}",
        )
    )
    if style == "one line" and one_line:
        items = f"{value} for n in nums" + (f" if {condition}" if condition else "")
        body = f"return {one_line.format(items=items)}\n"
    else:
        update = update.format(value=value) + "\n"
        if condition:
            update = f"if {condition}:\n{indent(update, '    ')}"
        body = f"{start}\nfor n in nums:\n{indent(update, '    ')}return {start.split()[0]}\n"
    source = head + indent(body, "    ")
    return Example(
        task="code",
        key=name,
        question=question,
        thought=f"The function {name} returns the {doc}. I use {style}.",
        answer=f"```python\n{source}```",
        expected={"name": name, "cases": [[numbers, _run(source, name)(list(numbers))] for numbers in INPUTS]},
    )


def _run(source: str, name: str) -> Callable[[list[int]], Any]:
    """Compile a model's text with the task's syntax only, and return its function ``name``.

    Raises:
        SyntaxError, ValueError: not Python, or outside the allowed syntax.
        KeyError: it does not define ``name``.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or isinstance(node, (ast.Pow, ast.LShift)):
            raise ValueError(f"{type(node).__name__} is outside the task's syntax")
        if isinstance(node, ast.Attribute) and ast.unparse(node) != "result.append":
            raise ValueError(f"attribute {ast.unparse(node)} is outside the task's syntax")
    names: dict[str, Any] = {"__builtins__": _BUILTINS}
    exec(compile(tree, "<answer>", "exec"), names)
    return names[name]


# Errors of a text without a code block, or of a program of the allowed syntax.
_WRONG_ANSWER = (
    ArithmeticError, AttributeError, LookupError, MemoryError, NameError, RecursionError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip


def check(expected: Any, text: str) -> bool:
    return _results(expected, text) == [result for _, result in expected["cases"]]


def _results(expected: Any, text: str) -> list[Any] | None:
    try:
        source = text.split("```python\n", 1)[1].split("```")[0]
        function = _run(source, expected["name"])
        return [function(list(numbers)) for numbers, _ in expected["cases"]]
    except _WRONG_ANSWER:
        return None
