"""Our Triton kernels on the device against their definitions in torch: a row per kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

from tools.gpu.run_step import Run, main

ROOT = Path(__file__).parents[3]
CASES = ("tests/ops/cases.py", "tests/states/cases.py")


def body(run: Run) -> bool:
    report = run.out / "kernels.xml"
    environment = {**os.environ, "OPS_DEVICE": "cuda" if run.real else "cpu"}
    environment["TRITON_INTERPRET"] = "0" if run.real else "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *CASES,
    ]
    ended = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if not report.exists():
        run.write(error=f"pytest ended with {ended.returncode} and no report")
        return False
    passed, failed, first = results(report.read_text())
    for kernel in sorted(passed | failed):
        row = {"kernel": kernel, "cases": passed[kernel] + failed[kernel], "failed": failed[kernel]}
        run.write(**row, **({"error": first[kernel]} if kernel in first else {}))
    return not failed and bool(passed)


def results(report: str) -> tuple[Counter[str], Counter[str], dict[str, str]]:
    """Passed and failed cases by kernel, and the first failure of each, from a JUnit report."""
    passed: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    first: dict[str, str] = {}
    for case in xml.fromstring(report).iter("testcase"):
        kernel = case.attrib["name"].partition("[")[0].removeprefix("test_")
        bad = [each for each in case if each.tag in ("failure", "error")]
        (failed if bad else passed)[kernel] += 1
        if bad:
            first.setdefault(kernel, f"{case.attrib['name']}: {bad[0].attrib.get('message', '')}"[:300])
    return passed, failed, first


if __name__ == "__main__":
    main("kernels", body)
