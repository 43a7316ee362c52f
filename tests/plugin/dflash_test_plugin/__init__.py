"""An SGLang plugin for tests: looks into a server, or changes what it does, in the modes that a test names.

A server loads it when ``tests/plugin`` is on PYTHONPATH. ``SGLANG_DFLASH_TEST_PLUGIN`` names the modes, separated by
commas; ``SGLANG_DFLASH_TEST_FOLDER`` is the folder that they write to or read from. Under
``SGLANG_DFLASH_FORBID_SYNC`` the worker's guard watches CPU devices too.
"""

from __future__ import annotations

import os

DRAFT = "sglang_dflash.worker.forwards.Draft.draft"
VERIFY = "sglang_dflash.worker.forwards.Verify.verify"
CONTEXT_KV = "sglang_dflash.model.drafter.DFlashDraftModel.context_kv"
FORWARD = "sglang_dflash.model.drafter.DFlashDraftModel.forward"
COMMIT = "sglang_dflash.worker.commit.RecurrentCommit.commit"
DECODE = "sglang_dflash.worker.worker.DFlashWorker._decode"
PREFILL = "sglang_dflash.worker.worker.DFlashWorker._prefill"
OFFER = "sglang_dflash.worker.copies.Copies.offer"
CHOOSE = "sglang_dflash.worker.accept.Accept.target_tokens"
WIDTH = "sglang_dflash.worker.worker.DFlashWorker._choose_width"
RUN = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
TIMER = "sglang_dflash.worker.flight.StepTimer"
HEAD = "sglang_dflash.model.vocabulary.TargetVocabulary.argmax_token"
GATHER = "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather"
DRAW = "sglang_dflash.width.policy.RandomWidth.width"
LEARN = "sglang_dflash.width.adaptive.AdaptiveWidth.observe"
STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
SGLANG_ACCEPT = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._accept_block"
PENALTIES = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.plugins.hook_registry import HookType as When

    from dflash_test_plugin import changes, probe

    modes = {
        "acceptance": [(DRAW, probe.chosen_width, When.AFTER), (OFFER, probe.record_and_refuse, When.AFTER)],
        "copy_rule": [],
        "drafts": [(DRAFT, probe.record_drafts, When.AFTER)],
        "faults": [
            (CONTEXT_KV, changes.spoil_context, When.AFTER),
            (FORWARD, changes.spoil_drafter, When.BEFORE),
            (VERIFY, changes.spoil_target, When.AFTER),
        ],
        "free_bytes": [
            (f"{CONFIGURATOR}.KVCacheConfigurator._profile_available_bytes", changes.without_slack, When.AROUND),
            (f"{CONFIGURATOR}.get_available_gpu_memory", changes.free_bytes, When.AROUND),
            ("sglang_dflash_cpu.arguments._defaults", changes.without_sizes, When.REPLACE),
        ],
        "gathers": [(GATHER, probe.count_gathered, When.BEFORE), (DECODE, probe.record_gathered, When.AROUND)],
        "history": [(DECODE, probe.compare, When.BEFORE)],
        "mixed": [(PREFILL, probe.record_mixed, When.AFTER)],
        "states": [
            (COMMIT, probe.record_committed_state, When.AFTER),
            (PREFILL, probe.record_prefilled_state, When.AFTER),
        ],
        "sglangs_drafts": [(SGLANG_ACCEPT, probe.record_candidates, When.BEFORE)],
        "oracle": [(DRAFT, changes.know_answers, When.AFTER)],
        "penalty_order": [(PENALTIES, changes.as_for_a_block_of_one, When.AROUND)],
        "pools": [(STATE, probe.count_lost, When.AFTER)],
        "rounds": [
            (WIDTH, probe.record_round, When.AFTER),
            (FORWARD, probe.check_draft, When.BEFORE),
            (RUN, probe.check_verify, When.BEFORE),
        ],
        "skew": [
            (HEAD, changes.hidden_states, When.BEFORE),
            (CHOOSE, changes.target_tokens, When.AFTER),
            (f"{TIMER}.finished", changes.times, When.AFTER),
            (COMMIT, changes.write, When.AFTER),
        ],
        "skew_times": [(f"{TIMER}.finished", changes.times, When.AFTER)],
        "times": [(f"{TIMER}.finished", changes.fixed_times, When.AFTER)],
        "skew_policy": [(LEARN, changes.accept_lens, When.BEFORE)],
        "draw_twice": [(CHOOSE, changes.draw_twice, When.AROUND)],
        "keep_likely": [(CHOOSE, changes.keep_likely, When.AROUND)],
    }
    if os.environ.get("SGLANG_DFLASH_FORBID_SYNC"):
        from dflash_test_plugin import host_waits

        host_waits.install()
    asked = [*filter(None, os.environ.get("SGLANG_DFLASH_TEST_PLUGIN", "").split(","))]
    if "streams" in asked:
        from dflash_test_plugin import overlap

        modes["streams"] = overlap.hooks(When)
    if "copy_rule" in asked:
        changes.change_copy_rule()
    for mode in asked:
        for target, hook, when in modes[mode]:
            HookRegistry.register(target, hook, when)
