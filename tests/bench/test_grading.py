"""Right answers are found right, wrong ones wrong, and a generated program cannot hurt the benchmark."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sglang_dflash_lab.bench.tasks import answers
from sglang_dflash_lab.bench.tasks.sandbox import MIB, Limits, run_program


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (r"So the total is \boxed{1,234}.", True),
        (r"First 1234, then \boxed{12}", False),
        ("The answer is 1234.", True),
        ("The answer is $1,234.00", True),
        ("1234 is not it, 5 is", False),
        ("<think>1234</think>It is 7.", False),
        ("no number", False),
    ],
)
def test_number(text: str, right: bool):
    assert answers.same_number("1,234", text) is right


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [
        (r"\frac{3}{4}", r"thus \boxed{\dfrac34}", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\frac{\pi}{2})}", True),
        ("90", r"\boxed{90^\circ}", True),
        ("5", r"\boxed{5.0}", True),
        (r"x^{2}", r"\boxed{x^{3}}", False),
        ("5", "the answer is 5", False),
        ("5", r"\boxed{5", False),
    ],
)
def test_formula(expected: str, text: str, right: bool):
    assert answers.same_formula(expected, text) is right


def test_code_block_prefers_the_one_that_defines_the_function():
    text = "```python\ndef f(): return 1\n```\nUsage:\n```python\nprint(f())\n```"
    assert answers.code_block(text, "f") == "def f(): return 1\n"
    assert answers.code_block(text) == "print(f())\n"
    assert answers.code_block("def g(): pass") == "def g(): pass"


@pytest.mark.parametrize("source", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_leaving_before_the_tests_is_not_passing(source: str):
    assert not answers.passes(source, "assert False")


def test_cases_from_stdin_and_by_function():
    stdin = [{"testtype": "stdin", "input": "2 3\n", "output": "5\n"}]
    assert answers.passes_cases("a, b = map(int, input().split())\nprint(a + b)", stdin, None)
    assert not answers.passes_cases("print(6)", stdin, None)
    functional = [{"testtype": "functional", "input": '[1, 2]\n"x"', "output": '"x3"'}]
    source = "class Solution:\n  def f(self, xs: List[int], s: str) -> str:\n    return s + str(sum(xs))"
    assert answers.passes_cases(source, functional, "f")


def test_cpu_and_wall_time_end_a_program():
    start = time.monotonic()
    assert not run_program("while True: pass", limits=Limits(cpu_s=1, wall_s=30)).ok
    assert not run_program("import time; time.sleep(60)", limits=Limits(wall_s=1)).ok
    assert time.monotonic() - start < 30


def test_memory_and_file_size_are_bounded():
    assert not run_program("x = bytearray(1 << 30)", limits=Limits(memory_bytes=256 * MIB)).ok
    assert not run_program("open('f', 'wb').write(bytes(1 << 22))").ok
    outcome = run_program("print('x' * (1 << 22))")
    assert not outcome.ok
    assert len(outcome.stdout) <= 100_000


def test_the_environment_stays_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "s3cret")
    outcome = run_program("import os; print(dict(os.environ)); open('left', 'w').write('x')")
    assert outcome.ok
    assert "s3cret" not in outcome.stdout
    assert not list(Path.cwd().glob("left"))


def test_children_die_with_the_program(tmp_path: Path):
    marker = tmp_path / "alive"
    source = f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 2; touch {marker}'])"
    assert run_program(source).ok
    time.sleep(3)
    assert not marker.exists()


def test_no_network_where_the_kernel_lets_us():
    from sglang_dflash_lab.bench.tasks import sandbox

    if not sandbox._without_network():
        pytest.skip("this machine does not let an unprivileged user make a network namespace")
    outcome = run_program("import socket; print([name for _, name in socket.if_nameindex()])")
    assert outcome.stdout.strip() == "['lo']"
