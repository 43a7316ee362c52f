"""The rules of a launch, in the order in which a start and ``sglang-dflash check`` apply them.

Sources: SGLang 0.5.23's ``layers/attention/attention_registry.py`` and ``arg_groups/attention_hook.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from sglang_dflash.errors import DFlashError, Finding, error, note, ok, warn
from sglang_dflash.launch import choice
from sglang_dflash.launch.asked import OUR_BACKEND, Launch
from sglang_dflash.launch.attention import default_backend, verify_obstacle
from sglang_dflash.launch.exact import check_exact
from sglang_dflash.launch.pair_rules import DRAFTER_RULES
from sglang_dflash.launch.plan import check_backup, check_overlap
from sglang_dflash.launch.published import published_drafters
from sglang_dflash.launch.settings import ONE_FORWARD_SWITCH, READ, flag_of
from sglang_dflash.launch.states import check_records, check_snapshots, check_states
from sglang_dflash.launch.widths import check_widths

Rule = Callable[[Launch], Iterator[Finding]]

# backend -> major compute capabilities that can run it
_MAJORS = {"fa3": {8, 9}, "fa4": {9, 10, 11}, "trtllm_mha": {9, 10, 12}, "aiter": set[int]()}
# for blocks: on sm_120 and sm_121 FlashInfer's kernel for trtllm_mla takes one token per request
_MAJORS |= {"flashmla": {9}, "trtllm_mla": {10}, "cutedsl_mla": {10}}
_HYBRID_ON_BLACKWELL = {"triton", "trtllm_mha", "flashinfer", "fa4"}
_TARGET_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_DRAFT_BACKEND = "speculative_draft_attention_backend"


def judge(launch: Launch, rules: Mapping[str, Rule]) -> Iterator[Finding]:
    """Yield the first finding of each rule, an ok one without any.

    The last one may have the level ``builtin``, or say why no later rule can read the pair.
    """
    for about, rule in rules.items():
        try:
            found = next(rule(launch), ok("as expected"))
            if found.level == "builtin":
                found = next(choice.served_by_neither(found.value, launch), found)
        except DFlashError as refused:
            found = Finding.of(refused)
        yield replace(found, about=about)
        if found.level == "builtin" or (found.level in ("warn", "error") and about in _DECISIVE):
            return


def _variables(launch: Launch) -> Iterator[Finding]:
    launch.settings.validate()
    yield from ()


def _configuration(launch: Launch) -> Iterator[Finding]:
    if launch.device.kind == "gpu" and launch.kind:
        yield warn(
            f"the drafter type is {launch.kind}",
            remedy="none needed on a GPU: SGLang's own worker serves it, without this package's features",
        )
    else:
        _ = launch.drafter, launch.widths, launch.hybrid


def _drafter_path(launch: Launch) -> Iterator[Finding]:
    settings = launch.settings
    if launch.has_drafter:
        return
    if settings.disaggregation_mode != "null":
        yield error(
            f"--disaggregation-mode {settings.disaggregation_mode} without a drafter",
            remedy="set --speculative-draft-model-path, or leave --disaggregation-mode out",
        )
    for flag in (
        flag_of(name) for name in sorted(READ) if name.startswith("speculative_draft_") and getattr(settings, name)
    ):
        yield error(
            f"{flag} without --speculative-draft-model-path",
            remedy=f"set --speculative-draft-model-path, or leave {flag} out",
        )
    drafter = published_drafters().get(settings.model_path)
    published = f"; --speculative-draft-model-path auto serves the published drafter {drafter}" if drafter else ""
    yield note(
        f"there is no drafter: blocks are copied from text that a request repeats{published}",
        remedy="none needed; a drafter's card names its target",
    )


def cannot_roll_back(backend: str | None, grammar: str) -> DFlashError:
    return DFlashError(
        f"--grammar-backend {backend}: {grammar} has no rollback, and one constrained request would end the server",
        remedy="set --grammar-backend xgrammar or llguidance",
    )


def _grammars(launch: Launch) -> Iterator[Finding]:
    if launch.settings.grammar_backend == "outlines":
        yield Finding.of(cannot_roll_back("outlines", "OutlinesGrammar"))


def _acceptance(launch: Launch) -> Iterator[Finding]:
    flags = {
        "--speculative-use-rejection-sampling": launch.settings.speculative_use_rejection_sampling,
        "--speculative-use-block-verification": launch.settings.speculative_use_block_verification,
    }
    if given := [flag for flag, value in flags.items() if value]:
        yield note(
            f"{' '.join(given)} has no effect: each committed token is the target's own draw, with the request's seed",
            remedy="leave it out",
        )


def _backend(name: str, launch: Launch) -> Iterator[Finding]:
    settings, device, of_target = launch.settings, launch.device, name in _TARGET_BACKENDS
    if device.capability is None:
        yield ok(f"not checked against {device.name}: no CUDA compute capability is known")
        return
    (major, minor), best, backend = device.capability, default_backend(launch.text, device), getattr(settings, name)
    is_default = name == "attention_backend" and not any(getattr(settings, each) for each in _TARGET_BACKENDS)
    backend = best if is_default else backend
    if backend is None:
        return
    limited = launch.hybrid and device.is_blackwell and of_target
    runs = _runs(backend, major) and not (limited and backend not in _HYBRID_ON_BLACKWELL)
    obstacle = verify_obstacle(backend, launch.text, major) if of_target else None
    offered = [device.default_backend, "flashinfer", "triton"]
    if of_target:
        offered = [each for each in (best, "fa3", *offered[1:]) if _serves(each, launch, major)]
    if obstacle or not runs:
        flag = flag_of(name)
        given = f"SGLang's choice {backend}" if is_default else f"{flag} {backend}"
        yield error(
            f"{given} on {device.name} (compute capability {major}.{minor}){f': {obstacle}' if runs else ''}",
            remedy=f"set {flag} {offered[0]}",
        )


def _runs(backend: str, major: int) -> bool:
    return major in _MAJORS.get(backend, {major})


def _serves(backend: str, launch: Launch, major: int) -> bool:
    return _runs(backend, major) and verify_obstacle(backend, launch.text, major) is None


def _draft_backend(launch: Launch) -> Iterator[Finding]:
    if not launch.has_drafter or launch.device.kind == "cpu":
        return
    backend = launch.draft_backend
    if backend == OUR_BACKEND and (obstacle := launch.backend_obstacle):
        yield error(
            f"--speculative-draft-attention-backend {OUR_BACKEND}: {obstacle}",
            remedy="leave --speculative-draft-attention-backend out",
        )
    if launch.settings.wants_one_forward and backend != OUR_BACKEND:
        yield warn(
            f"{ONE_FORWARD_SWITCH}=1 has no effect: the drafter's attention is {backend or 'unknown'}",
            remedy=f"set it, or unset {ONE_FORWARD_SWITCH}",
        )
    yield ok(str(backend or "unknown"))


def _with_drafter(rule: Rule) -> Rule:
    return lambda launch: rule(launch) if launch.has_drafter else iter(())


# Before SGLang resolves its arguments
EARLY: dict[str, Rule] = {
    "variables and numbers": _variables,
    "switch": choice.check_switch,
    "target": choice.check_target,
    "drafter": _drafter_path,
    "grammar backend": _grammars,
    "sampled acceptance": _acceptance,
    "configuration": _configuration,
    **{about: _with_drafter(rule) for about, rule in DRAFTER_RULES.items()},
    "recurrent snapshots": check_snapshots,
    "drafter's attention backend": _draft_backend,
    **{flag_of(name): partial(_backend, name) for name in (*_TARGET_BACKENDS, _DRAFT_BACKEND)},
}
# With the resolved ones
LATE: dict[str, Rule] = {
    "worker": choice.check_worker,
    "DP attention": choice.check_dp_attention,
    "other uses": choice.check_uses,
    "widths": check_widths,
    "recurrent states": check_states,
    "replay records": check_records,
    "overlap": check_overlap,
    "drafter's weights": check_backup,
    "exact": check_exact,
}
_DECISIVE = {"variables and numbers", "target", "configuration"}
