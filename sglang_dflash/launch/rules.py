"""The rules of a launch, in the order of a start and of ``sglang-dflash check``."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from sglang_dflash.errors import DFlashError, Finding, builtin, error, note, ok, warn
from sglang_dflash.launch import which_worker
from sglang_dflash.launch.attention import default_backend, verify_obstacle
from sglang_dflash.launch.exact import check_exact
from sglang_dflash.launch.launch import OUR_BACKEND, Launch
from sglang_dflash.launch.pair_rules import DRAFTER_RULES
from sglang_dflash.launch.published import card_of_target
from sglang_dflash.launch.settings import DRAFTER_ARGUMENTS, ONE_FORWARD_SWITCH, flag_of
from sglang_dflash.launch.states import check_records, check_snapshots, check_states
from sglang_dflash.launch.width_config import check_widths

Rule = Callable[[Launch], Iterator[Finding]]

_TARGET_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_DRAFT_BACKEND = "speculative_draft_attention_backend"


def judge(launch: Launch, rules: Mapping[str, Rule]) -> Iterator[Finding]:
    """Yield all errors of each rule, and its first other finding; an ok finding if a rule yields none.

    Stop after a ``builtin`` finding, and after an error that a rule raises: later rules could not read the pair.
    """
    for about, rule in rules.items():
        is_first = True
        try:
            for found in rule(launch):
                if found.level == "builtin":
                    yield replace(next(which_worker.served_by_neither(found.value, launch), found), about=about)
                    return
                if is_first or found.level == "error":
                    yield replace(found, about=about)
                is_first = False
        except DFlashError as refused:
            yield Finding.of(refused, about)
            return
        if is_first:
            yield ok("", about=about)


def _variables(launch: Launch) -> Iterator[Finding]:
    launch.settings.validate()
    yield from ()


def _configuration(launch: Launch) -> Iterator[Finding]:
    if launch.foreign_type:
        yield builtin(f"the drafter type is {launch.foreign_type}")
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
    for flag in (flag_of(name) for name in DRAFTER_ARGUMENTS if getattr(settings, name)):
        yield error(
            f"{flag} without --speculative-draft-model-path",
            remedy=f"set --speculative-draft-model-path, or leave {flag} out",
        )
    card = card_of_target(settings.model_path)
    published = f"; --speculative-draft-model-path auto serves {card['drafter']}" if card else ""
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


def _backend(name: str, launch: Launch) -> Iterator[Finding]:
    settings, device, flag = launch.settings, launch.device, flag_of(name)
    if device.capability is None:
        yield ok(f"not checked against {device.name}: no CUDA compute capability is known")
        return
    best = default_backend(launch.text, device)
    is_default = name == "attention_backend" and not any(getattr(settings, each) for each in _TARGET_BACKENDS)
    backend, text = best if is_default else getattr(settings, name), launch.text if name in _TARGET_BACKENDS else {}
    obstacles = {each: verify_obstacle(each, text, device.capability[0]) for each in (best, "fa3", "triton", backend)}
    if obstacles[backend]:
        given = f"SGLang's choice {backend}" if is_default else f"{flag} {backend}"
        served = next(each for each, obstacle in obstacles.items() if obstacle is None)
        yield error(f"{given} on {device.name}: {obstacles[backend]}", remedy=f"set {flag} {served}")


def _draft_backend(launch: Launch) -> Iterator[Finding]:
    if not launch.has_drafter or launch.device.kind == "cpu":
        return
    backend = launch.draft_backend
    if backend == OUR_BACKEND and (obstacle := launch.backend_obstacle):
        yield error(
            f"--speculative-draft-attention-backend {OUR_BACKEND}: {obstacle}",
            remedy="leave --speculative-draft-attention-backend out",
        )
    other = f"the drafter's attention backend {backend or 'unknown'}" if backend != OUR_BACKEND else None
    if launch.settings.asks_one_forward and (obstacle := launch.settings.one_forward_obstacle or other):
        yield warn(f"{ONE_FORWARD_SWITCH}=1 has no effect with {obstacle}", remedy=f"unset {ONE_FORWARD_SWITCH}")
    yield ok(str(backend or "unknown"))


def _with_drafter(rule: Rule) -> Rule:
    return lambda launch: rule(launch) if launch.has_drafter else iter(())


# Before SGLang resolves its arguments
EARLY: dict[str, Rule] = {
    "variables and numbers": _variables,
    "switch": which_worker.check_switch,
    "target": which_worker.check_target,
    "drafter": _drafter_path,
    "grammar backend": _grammars,
    "configuration": _configuration,
    **{about: _with_drafter(rule) for about, rule in DRAFTER_RULES.items()},
    "recurrent snapshots": check_snapshots,
    "drafter's attention backend": _draft_backend,
    **{flag_of(name): partial(_backend, name) for name in (*_TARGET_BACKENDS, _DRAFT_BACKEND)},
}
# With the resolved ones
LATE: dict[str, Rule] = {
    "worker": which_worker.check_worker,
    "recurrent states": check_states,
    "DP attention": which_worker.check_dp_attention,
    "other uses": which_worker.check_uses,
    "widths": check_widths,
    "replay records": check_records,
    "exact": check_exact,
}
