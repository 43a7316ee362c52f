"""An SGLang plugin for tests: looks into a server, or changes what it does, in the modes that a test names.

A server loads it when ``tests/plugin`` is on PYTHONPATH. ``SGLANG_DFLASH_TEST_PLUGIN`` names the modes, separated by
commas; ``SGLANG_DFLASH_TEST_FOLDER`` is the folder that they write to or read from. Under
``SGLANG_DFLASH_FORBID_SYNC`` the worker's guard watches CPU devices too.
"""

from __future__ import annotations

import os

DRAFT = "sglang_dflash.worker.forwards.Draft.__call__"
VERIFY = "sglang_dflash.worker.forwards.Verify.__call__"
CONTEXT_KV = "sglang_dflash.model.drafter.DFlashDraftModel.context_kv"
FORWARD = "sglang_dflash.model.drafter.DFlashDraftModel.forward"
COMMIT = "sglang_dflash.states.commit.RecurrentCommit.__call__"
DECODE = "sglang_dflash.worker.worker.DFlashWorker._decode"
PREFILL = "sglang_dflash.worker.worker.DFlashWorker._prefill"
CHOOSE = "sglang_dflash.worker.accept.Accept.target_tokens"
STEPS = "sglang_dflash.worker.observe.observer.Steps"
HEAD = "sglang_dflash.model.vocabulary.TargetVocabulary.argmax_token"
LEARN = "sglang_dflash.width.adaptive.AdaptiveWidth.observe"
WIDTH = "sglang_dflash.width.policy.FixedWidth.width"
STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
PENALTIES = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.plugins.hook_registry import HookType as When

    from dflash_test_plugin import (
        copy_rule,
        faults,
        history,
        host_copies,
        oracle,
        penalty_order,
        pools,
        probe,
        skew,
        step_files,
        widths,
        wrong_rule,
    )

    modes = {
        "copy_rule": [(HEAD, copy_rule.tell_probabilities, When.AROUND)],
        "drafts": [(DRAFT, probe.record_drafts, When.AFTER)],
        "faults": [
            (CONTEXT_KV, faults.spoil_context, When.AFTER),
            (FORWARD, faults.spoil_drafter, When.BEFORE),
            (VERIFY, faults.spoil_target, When.AFTER),
        ],
        "history": [(DECODE, history.compare, When.BEFORE)],
        "host_copies": [(DECODE, host_copies.record, When.AROUND)],
        "mixed": [(PREFILL, probe.record_mixed, When.AFTER)],
        "step_files": [(DECODE, step_files.trace, When.AROUND)],
        "states": [
            (COMMIT, probe.record_committed_state, When.AFTER),
            (PREFILL, probe.record_prefilled_state, When.AFTER),
        ],
        "oracle": [(DRAFT, oracle.know_answers, When.AFTER)],
        "penalty_order": [(PENALTIES, penalty_order.as_for_a_block_of_one, When.AROUND)],
        "pools": [(STATE, pools.count, When.AFTER)],
        "skew": [
            (HEAD, skew.hidden_states, When.BEFORE),
            (CHOOSE, skew.logits, When.BEFORE),
            (f"{STEPS}.timed", skew.times, When.AFTER),
            (COMMIT, skew.write, When.AFTER),
        ],
        "skew_policy": [(LEARN, skew.accept_lens, When.BEFORE)],
        "draw_twice": [(CHOOSE, wrong_rule.draw_twice, When.AROUND)],
        "widths": [(WIDTH, widths.in_turn, When.AFTER)],
        "keep_likely": [(CHOOSE, wrong_rule.keep_likely, When.AROUND)],
    }
    if os.environ.get("SGLANG_DFLASH_FORBID_SYNC"):
        from dflash_test_plugin import host_waits

        host_waits.install()
    asked = [*filter(None, os.environ.get("SGLANG_DFLASH_TEST_PLUGIN", "").split(","))]
    if "streams" in asked:
        from dflash_test_plugin import overlap

        modes["streams"] = overlap.hooks(When)
    if "copy_rule" in asked:
        copy_rule.change()
    for mode in asked:
        for target, hook, when in modes[mode]:
            HookRegistry.register(target, hook, when)
