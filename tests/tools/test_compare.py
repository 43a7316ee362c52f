"""Two releases apart: which difference is of which kind, and what the report says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.contract.compare import BREAKS, CODE, INTERFACE, LOST, UNKNOWN, Change, compare
from tools.contract.probe import Need, Seen
from tools.contract.report import Result, markdown, verdict

NEED = Need("sglang.srt.spec.verify", ("block",), "worker/verify.py: The target's pass over a block")
TYPE = Need("sglang.srt.batch.Batch", (), "attributes of it are read", by_attribute=True)
BEFORE = Seen(None, None, ("block", "width"), ("block",), "c0de", ("lens", "reqs"))


def compared(after: Seen, need: Need = NEED, read: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    found = compare([need], {need.path: BEFORE}, {need.path: after}, set(read))
    return [(change.kind, change.what) for change in found]


def test_the_same_is_no_change() -> None:
    assert compared(BEFORE) == []


@pytest.mark.parametrize(
    ("after", "change"),
    [
        (Seen(problem=f"{NEED.path}: not found (x)"), (BREAKS, "not found (x)")),
        (
            replace(BEFORE, problem=f"{NEED.path}: parameters ['block'] not in (x)"),
            (BREAKS, "parameters ['block'] not in (x)"),
        ),
        (Seen(problem="not found", unimportable="no x"), (UNKNOWN, "cannot be imported here (no x)")),
        (
            replace(BEFORE, parameters=("block", "rank"), required=("block", "rank")),
            (BREAKS, "cannot be called without rank"),
        ),
        (replace(BEFORE, parameters=("block", "rank")), (INTERFACE, "new: rank; gone: width")),
        (replace(BEFORE, parameters=("width", "block")), (INTERFACE, "in another order: width, block")),
        (replace(BEFORE, code="0ther"), (CODE, "other code")),
    ],
)
def test_one_change_has_one_kind(after: Seen, change: tuple[str, str]) -> None:
    assert compared(after) == [change]


def test_a_class_that_gained_a_hundred_fields_has_one_short_line() -> None:
    after = replace(BEFORE, parameters=(*(BEFORE.parameters or ()), *(f"field_{i}" for i in range(100))))
    [(kind, what)] = compared(after)
    assert (kind, what.endswith("field_5 and 94 more")) == (INTERFACE, True)


def test_a_parameter_that_became_required_and_that_we_pass_breaks_nothing() -> None:
    assert compared(replace(BEFORE, required=("block", "width"))) == []


def test_what_we_do_not_call_cannot_break_by_its_parameters() -> None:
    after = replace(BEFORE, parameters=("rank",), required=("rank",))
    assert compared(after, TYPE) == [(INTERFACE, "cannot be called without rank")]


def test_lost_attributes_count_where_this_package_reads_one_of_that_name() -> None:
    after = replace(BEFORE, attributes=("reqs_",))
    assert compared(after, TYPE, frozenset({"reqs", "other"})) == [(LOST, "lost reqs")]


def test_the_worst_comes_first() -> None:
    needs = [replace(NEED, path=name) for name in ("fine", "read", "gone")]
    after = {"fine": BEFORE, "read": replace(BEFORE, code="0ther"), "gone": Seen(problem="gone: not found")}
    found = compare(needs, dict.fromkeys(after, BEFORE), after, set())
    assert [change.need.path for change in found] == ["gone", "read"]


def result(*kinds: str, **more: object) -> Result:
    changes = [Change(kind, replace(NEED, path=f"sglang.srt.{kind.split()[0]}"), "what | how") for kind in kinds]
    return Result("0.6.0", "0.5.23", 7, changes, **more)  # type: ignore[arg-type]


def test_a_verdict_counts_and_only_what_fits_is_said_to_fit() -> None:
    assert verdict(result()) == "**Fits**: all 7 names are as in 0.5.23."
    assert verdict(result(INTERFACE, CODE, CODE)).startswith("**Fits**, to be read")
    assert "parameters 1, code 2" in verdict(result(INTERFACE, CODE, CODE))
    for kind in (BREAKS, UNKNOWN):
        assert verdict(result(kind, CODE)) == f"**Does not fit**: of 7 names {kind} 1, code 1."
        assert not result(kind).fits
    assert verdict(result(failed="no torch")) == "**Not looked at**: no torch"
    assert not result(failed="no torch").fits


def test_every_changed_name_has_its_line() -> None:
    text = "\n".join(
        markdown(
            result(
                BREAKS,
                CODE,
                moved={"sglang.srt.breaks": ["sglang.srt.new"]},
                outcomes={"plain": "starts"},
                patches=["0010-x: why"],
                packages=["torch 2, not ==3"],
            )
        )
    )
    assert f"| breaks | `srt.breaks` | what \\| how; that name is in sglang.srt.new | {NEED.use} |" in text
    assert "in what is called and not replaced: `code`." in text
    for line in ("- plain: starts", "- patch that does not apply: 0010-x: why", "torch 2, not ==3"):
        assert line in text
