"""Rules of a command line on a machine, and the order of all rules.

Sources: SGLang 0.5.23's ``layers/attention/attention_registry.py`` and ``arg_groups/attention_hook.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_dflash.errors import DFlashError, Finding, error, first, note, ok, warn
from sglang_dflash.plan.attention import default_backend, verify_obstacle
from sglang_dflash.plan.device import Device
from sglang_dflash.plan.pair import OUR_BACKEND, Pair
from sglang_dflash.plan.pair_rules import PAIR_RULES, TARGET_RULES, Rule
from sglang_dflash.plan.published import published_drafters
from sglang_dflash.plan.settings import ONE_FORWARD_SWITCH, READ, Settings, flag_of

# backend -> major compute capabilities that can run it
_MAJORS = {"fa3": {8, 9}, "fa4": {9, 10, 11}, "trtllm_mha": {9, 10, 12}, "aiter": set[int]()}
# for blocks: on sm_120 and sm_121 FlashInfer's kernel for trtllm_mla takes one token per request
_MAJORS |= {"flashmla": {9}, "trtllm_mla": {10}, "cutedsl_mla": {10}}
_HYBRID_ON_BLACKWELL = {"triton", "trtllm_mha", "flashinfer", "fa4"}
_TARGET_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_DRAFT_BACKEND = "speculative_draft_attention_backend"


def check_rules(settings: Settings, pair: Pair, device: Device) -> list[Finding]:
    """Return all findings for valid settings; a launch raises the first error."""
    findings = [first(about, rule, settings, pair) for about, rule in _FLAGS.items()]
    findings.append(first("configuration", _configuration, pair, device))
    if findings[-1].level != "ok":
        return findings
    rules = PAIR_RULES if pair.has_drafter else TARGET_RULES
    findings += [first(about, rule, settings, pair) for about, rule in rules.items()]
    if pair.has_drafter and device.kind == "gpu":
        findings.append(first("drafter's attention backend", _draft_backend, settings, pair, device))
    return [*findings, *check_backends(settings, device, pair)]


def _configuration(pair: Pair, device: Device) -> Iterator[Finding]:
    if device.kind == "gpu" and pair.kind:
        yield warn(
            f"the drafter type is {pair.kind}",
            expected="a DFlash or DFlash2 drafter",
            remedy="none needed on a GPU: SGLang's own worker serves it, without this package's features",
        )
    else:
        pair.read()


def _drafter_path(settings: Settings, pair: Pair) -> Iterator[Finding]:
    if pair.has_drafter:
        return
    if settings.disaggregation_mode != "null":
        yield error(
            f"--disaggregation-mode {settings.disaggregation_mode} without a drafter",
            expected="a server that prefills and decodes, or a drafter",
            remedy="set --speculative-draft-model-path, or leave --disaggregation-mode out",
        )
    for flag in (
        flag_of(name) for name in sorted(READ) if name.startswith("speculative_draft_") and getattr(settings, name)
    ):
        yield error(
            f"{flag} without --speculative-draft-model-path",
            expected="a drafter for it",
            remedy=f"set --speculative-draft-model-path, or leave {flag} out",
        )
    drafter = published_drafters().get(settings.model_path)
    published = f"; --speculative-draft-model-path auto serves the published drafter {drafter}" if drafter else ""
    yield note(
        f"there is no drafter: blocks are copied from text that a request repeats{published}",
        expected="a drafter that was trained for this target, for text that repeats nothing",
        remedy="none needed; a drafter's card names its target",
    )


def _block_flags(settings: Settings, pair: Pair) -> Iterator[Finding]:
    tokens, block = settings.speculative_num_draft_tokens, settings.speculative_dflash_block_size
    if None not in (tokens, block) and tokens != block:
        yield error(
            f"--speculative-num-draft-tokens {tokens} and --speculative-dflash-block-size {block}",
            expected="one value: both are the block size",
            remedy="keep one of the two flags",
        )


def _pipeline(settings: Settings, pair: Pair) -> Iterator[Finding]:
    if settings.pp_size > 1:
        yield error(
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


def _grammars(settings: Settings, pair: Pair) -> Iterator[Finding]:
    if settings.grammar_backend == "outlines":
        yield Finding.of(cannot_roll_back("outlines", "OutlinesGrammar"))


def _acceptance(settings: Settings, pair: Pair) -> Iterator[Finding]:
    flags = {
        "--speculative-use-rejection-sampling": settings.speculative_use_rejection_sampling,
        "--speculative-use-block-verification": settings.speculative_use_block_verification,
    }
    if given := [flag for flag, value in flags.items() if value]:
        yield note(
            f"{' '.join(given)} has no effect: each committed token is the target's own draw, with the request's seed",
            expected="no flag: unsure drafts are drawn with the same seed, so that sampled requests accept more",
            remedy="leave it out",
        )


_FLAGS: dict[str, Rule] = {
    "drafter": _drafter_path,
    "block flags": _block_flags,
    "pipeline parallelism": _pipeline,
    "grammar backend": _grammars,
    "sampled acceptance": _acceptance,
}


def check_backends(settings: Settings, device: Device, pair: Pair) -> Iterator[Finding]:
    """None are checked without a known compute capability."""
    if device.capability is None:
        yield ok(f"not checked against {device.name}: no CUDA compute capability is known", about="backends")
        return
    (major, minor), best = device.capability, default_backend(pair.text, device)
    usable = [
        each for each in (best, "fa3", "flashinfer", "triton") if _runs(each, major) and _serves(each, pair, major)
    ]
    chosen = {name: getattr(settings, name) for name in (*_TARGET_BACKENDS, _DRAFT_BACKEND)}
    is_default = not any(chosen[name] for name in _TARGET_BACKENDS)
    chosen |= {"attention_backend": best} if is_default else {}
    for name, backend in chosen.items():
        of_target, flag = name in _TARGET_BACKENDS, flag_of(name)
        limited = pair.hybrid and device.is_blackwell and of_target
        runs = _runs(backend, major) and not (limited and backend not in _HYBRID_ON_BLACKWELL)
        obstacle = verify_obstacle(backend, pair.text, major) if backend and of_target else None
        offered = usable if of_target else [device.default_backend, "flashinfer", "triton"]
        if backend and (obstacle or not runs):
            given = f"{flag} {backend}" if not (is_default and of_target) else f"SGLang's choice {backend}"
            yield error(
                f"{given} on {device.name} (compute capability {major}.{minor}){f': {obstacle}' if runs else ''}",
                expected=f"a backend that this GPU can run: {', '.join(dict.fromkeys(offered))}",
                remedy=f"set {flag} {offered[0]}",
                about=flag,
            )


def _runs(backend: str, major: int) -> bool:
    return major in _MAJORS.get(backend, {major})


def _serves(backend: str, pair: Pair, major: int) -> bool:
    return _runs(backend, major) and verify_obstacle(backend, pair.text, major) is None


def _draft_backend(settings: Settings, pair: Pair, device: Device) -> Iterator[Finding]:
    backend = pair.draft_backend(settings, device)
    if backend == OUR_BACKEND and (obstacle := pair.backend_obstacle(settings)):
        yield error(
            f"--speculative-draft-attention-backend {OUR_BACKEND}: {obstacle}",
            expected="K/V of 8, 16 or 32 bits, and heads of a power of two up to 256",
            remedy="leave --speculative-draft-attention-backend out",
        )
    if settings.wants_one_forward and backend != OUR_BACKEND:
        yield warn(
            f"{ONE_FORWARD_SWITCH}=1 has no effect: the drafter's attention is {backend or 'unknown'}",
            expected=f"--speculative-draft-attention-backend {OUR_BACKEND}",
            remedy=f"set it, or unset {ONE_FORWARD_SWITCH}",
        )
    yield ok(str(backend or "unknown"))
