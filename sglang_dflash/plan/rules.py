"""Rules of a command line on a machine, and the order of all rules.

Sources: SGLang 0.5.23's ``layers/attention/attention_registry.py`` and ``arg_groups/attention_hook.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dflash.errors import DFlashError, Finding, apply, error, note, ok, warn
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.pair import OUR_BACKEND, Pair
from sglang_dflash.plan.pair_rules import PAIR_RULES, TARGET_RULES, Rule
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.plan.settings import DETERMINISTIC_FLAG, EXACT_SWITCH, Settings, flag_of

# backend -> major compute capabilities that can run it
_MAJORS = {"fa3": {8, 9}, "fa4": {9, 10, 11}, "trtllm_mha": {9, 10, 12}, "aiter": set[int]()}
_HYBRID_ON_BLACKWELL = {"triton", "trtllm_mha", "flashinfer", "fa4"}
_OF_DRAFTERS = (
    *("speculative_draft_window_size", "speculative_draft_attention_backend", "speculative_draft_kv_cache_dtype"),
    *("speculative_draft_model_quantization", "speculative_draft_model_revision"),
)
_SAMPLED_ACCEPTANCE = ("speculative_use_rejection_sampling", "speculative_use_block_verification")
_TARGET_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def check_rules(settings: Settings, pair: Pair, machine: Device) -> list[Finding]:
    """Return all findings; a launch raises the first error."""
    valid = apply("settings", _valid, settings)
    if valid.level == "error":
        return [valid]  # later rules compute with its numbers
    findings = [valid, *(apply(about, rule, settings, pair) for about, rule in _FLAGS.items())]
    read = apply("configuration", _configuration, pair, machine)
    if read.level != "ok":
        return [*findings, read]
    rules = PAIR_RULES if pair.has_drafter else TARGET_RULES
    findings += [apply(about, rule, settings, pair) for about, rule in rules.items()]
    if pair.has_drafter and machine.kind == "gpu":
        findings.append(apply("drafter's attention backend", _draft_backend, settings, pair, machine))
    findings += check_backends(settings, machine, hybrid=pair.hybrid)
    return findings


def _valid(settings: Settings) -> Finding:
    return ok(settings.validate())


def _configuration(pair: Pair, machine: Device) -> Finding:
    if machine.kind == "gpu" and pair.kind:
        return warn(
            f"the drafter type is {pair.kind}",
            expected="a DFlash or DFlash2 drafter",
            remedy="none needed on a GPU: SGLang's own worker serves it, without this package's features",
        )
    pair.read()
    return ok("both are read")


def _drafter_path(settings: Settings, pair: Pair) -> Finding:
    if settings.speculative_draft_model_path:
        return ok(settings.speculative_draft_model_path)
    if settings.disaggregation_mode != "null":
        return error(
            f"--disaggregation-mode {settings.disaggregation_mode} without a drafter",
            expected="a server that prefills and decodes, or a drafter",
            remedy="set --speculative-draft-model-path, or leave --disaggregation-mode out",
        )
    given = [name for name in _OF_DRAFTERS if getattr(settings, name)]
    if given:
        return error(
            f"{flag_of(given[0])} without --speculative-draft-model-path",
            expected="a drafter for it",
            remedy=f"set --speculative-draft-model-path, or leave {flag_of(given[0])} out",
        )
    return note(
        "there is no drafter (--speculative-draft-model-path): blocks are copied from text that a request repeats",
        expected="a drafter that was trained for this target, for text that repeats nothing",
        remedy="none needed; a drafter's card names its target",
    )


def _block_flags(settings: Settings, pair: Pair) -> Finding:
    tokens, block = settings.speculative_num_draft_tokens, settings.speculative_dflash_block_size
    if tokens is None or block is None or tokens == block:
        return ok(str(settings.block or "from the drafter"))
    return error(
        f"--speculative-num-draft-tokens {tokens} and --speculative-dflash-block-size {block}",
        expected="one value: both are the block size",
        remedy="keep one of the two flags",
    )


def _pipeline(settings: Settings, pair: Pair) -> Finding:
    if settings.pp_size == 1:
        return ok("1")
    return error(
        f"--pp-size {settings.pp_size}",
        expected="1: a draft needs hidden states of the whole target",
        remedy="use --tp-size instead",
    )


def cannot_roll_back(backend: str | None, grammar: str) -> DFlashError:
    return DFlashError(
        f"--grammar-backend {backend}: {grammar} has no rollback, and one constrained request would end the server",
        expected="a backend whose grammars can be rolled back past rejected drafts",
        remedy="set --grammar-backend xgrammar or llguidance",
    )


def _grammars(settings: Settings, pair: Pair) -> Finding:
    if settings.grammar_backend == "outlines":
        return Finding.of(cannot_roll_back("outlines", "OutlinesGrammar"))
    return ok(settings.grammar_backend or "SGLang's default")


def _acceptance(settings: Settings, pair: Pair) -> Finding:
    given = [flag_of(name) for name in _SAMPLED_ACCEPTANCE if getattr(settings, name)]
    if not given:
        return ok("each committed token is the target's own draw")
    return note(
        f"{' '.join(given)} has no effect: each committed token is the target's own draw, with the request's seed",
        expected="no flag: a draft that is unsure is drawn with the same seed, so that sampled requests accept more",
        remedy="leave it out",
    )


_FLAGS: dict[str, Rule] = {
    "drafter": _drafter_path,
    "block flags": _block_flags,
    "pipeline parallelism": _pipeline,
    "grammar backend": _grammars,
    "sampled acceptance": _acceptance,
}


def check_backends(settings: Settings, machine: Device, *, hybrid: bool) -> Iterator[Finding]:
    """None are checked without a known compute capability."""
    names = (*_TARGET_BACKENDS, "speculative_draft_attention_backend")
    chosen = {name: value for name in names if (value := getattr(settings, name))}
    if machine.capability is None:
        yield ok(f"not checked against {machine.name}: no CUDA compute capability is known", about="backends")
        return
    for name, value in chosen.items():
        limited = hybrid and machine.is_blackwell and name in _TARGET_BACKENDS
        yield apply(flag_of(name), _backend, flag_of(name), value, machine, machine.capability, limited=limited)


def _draft_backend(settings: Settings, pair: Pair, machine: Device) -> Finding:
    backend = pair.draft_backend(settings, machine)
    if backend == OUR_BACKEND and (obstacle := pair.backend_obstacle(settings)):
        return error(
            f"--speculative-draft-attention-backend {OUR_BACKEND}: {obstacle}",
            expected="K/V of 8, 16 or 32 bits, and heads of a power of two up to 256",
            remedy="leave --speculative-draft-attention-backend out",
        )
    return ok(str(backend or "unknown"))


def _backend(flag: str, backend: str, machine: Device, capability: tuple[int, int], *, limited: bool) -> Finding:
    (major, minor), best = capability, machine.default_backend
    if major in _MAJORS.get(backend, {major}) and not (limited and backend not in _HYBRID_ON_BLACKWELL):
        return ok(f"{backend} on {machine.name}")
    return error(
        f"{flag} {backend} on {machine.name} (compute capability {major}.{minor})",
        expected=f"a backend that this GPU can run: {', '.join(dict.fromkeys((best, 'flashinfer', 'triton')))}",
        remedy=f"set {flag} {best}",
    )


def check_plan(plan: ServingPlan) -> Iterator[Finding]:
    if plan.exact or plan.inexact:
        yield apply("exact", _exact, plan)


def _exact(plan: ServingPlan) -> Finding:
    if plan.exact:
        return ok("greedy output is bit-identical to plain decoding")
    return warn(
        f"a verify is not exact under {DETERMINISTIC_FLAG}: {'; '.join(plan.inexact)}",
        expected="plain decoding through SGLang's Triton kernels, in bfloat16 on one GPU",
        remedy=f"change what is named, or set {EXACT_SWITCH}=0 to accept text that may differ at near-ties",
    )
