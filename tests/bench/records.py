"""Builders of benchmark records for the tests of metrics, tables and reports."""

from __future__ import annotations

from sglang_dflash_lab.bench.results import RequestRecord, Results, RunKey, RunRecord


def request(
    *,
    mode: str = "ar",
    task: str = "math",
    concurrency: int = 1,
    repeat: int = 0,
    question: str = "0",
    output_ids: tuple[int, ...] = (1, 2, 3, 4),
    latency_s: float = 1.0,
    ttft_s: float = 0.1,
    accepted: tuple[int, ...] = (),
    correct: bool | None = None,
) -> RequestRecord:
    """A request of ``len(output_ids)`` tokens; ``accepted`` has its drafts accepted per step."""
    histogram = [accepted.count(k) for k in range(max(accepted) + 1)] if accepted else []
    return RequestRecord(
        run=RunKey(mode, task, concurrency, repeat),
        question=question,
        turn=0,
        prompt_sha256=f"prompt {question}",
        prompt_tokens=10,
        cached_tokens=0,
        completion_tokens=len(output_ids),
        start_s=0.0,
        ttft_s=ttft_s,
        latency_s=latency_s,
        finish_reason="stop",
        verify_steps=len(accepted),
        accepted_drafts=histogram,
        output_ids=list(output_ids),
        text=f"answer of {mode}",
        correct=correct,
    )


def run(mode: str, *, task: str = "math", concurrency: int = 1, repeat: int = 0, wall_s: float = 1.0) -> RunRecord:
    worker = {"steps_by_width": {"16": 3}, "stage_seconds": {}} if mode.startswith("dflash") else None
    return RunRecord(
        RunKey(mode, task, concurrency, repeat), wall_s, 0, "2026-01-01T00:00:00+00:00", 0.5, worker=worker
    )


def provenance(pair: str | None = "tiny-hybrid", cores: int = 4) -> dict[str, object]:
    return {
        "command": "sglang-dflash bench --pair x",
        "time": "2026-01-01T00:00:00+00:00",
        "commit": "abc",
        "versions": {"sglang": "0.5.23", "sglang-dflash": "0.5.23.1"},
        "hardware": {"cpu": "a CPU", "cores": cores, "memory_gib": 8.0, "gpus": [], "system": "Linux"},
        "environment": {"OMP_NUM_THREADS": "1"},
        "settings": {
            "pair": pair,
            "target": "t",
            "drafter": "d",
            "num_prompts": 2,
            "seed": 0,
            "sampling": {"max_tokens": 8, "temperature": 0.0},
        },
    }


def comparison(
    *, dflash_wall_s: float = 0.5, dflash_output: tuple[int, ...] = (1, 2, 3, 4), repeats: int = 3
) -> Results:
    """Plain decoding of two questions in one second per repeat, and a DFLASH arm to be varied."""
    results = Results(provenance=[provenance()])
    for repeat in range(repeats):
        for mode, wall_s, output in (("ar", 1.0, (1, 2, 3, 4)), ("dflash:16", dflash_wall_s, dflash_output)):
            for question in "01":
                results.requests.append(
                    request(
                        mode=mode,
                        repeat=repeat,
                        question=question,
                        output_ids=output if question == "1" else (1, 2, 3, 4),
                        latency_s=wall_s / 2,
                        ttft_s=wall_s / 10,
                        accepted=(2,) if mode != "ar" else (),
                        correct=True,
                    )
                )
            results.runs.append(run(mode, repeat=repeat, wall_s=wall_s))
    return results
