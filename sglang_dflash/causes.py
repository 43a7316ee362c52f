"""Causes of rejected drafts with their fixes, and the thresholds of a judgement."""

from dataclasses import dataclass

NOT_FINITE, LOAD, FLOAT16, QUANTISED_DRAFTER = "drafts not finite", "load", "float16", "quantised drafter"
STALE_DRAFTER = "drafter older than target"
NO_SERVER_TEMPLATE, NO_TEMPLATE = "no chat template on the server", "no chat template"
THINKING = {True: "thinking on", False: "thinking off"}
CONTEXT, OTHER_TARGET = "context beyond the drafter's", "drafter of another target"
DRAFTER, QUANTISED_TARGET, SAMPLING = "drafter", "quantised target", "sampling"

# The likeliest first. Causes after `drafter` rarely suffice alone.
FIXES = {
    NOT_FINITE: "compare the drafter's dtype and files with its card",
    STALE_DRAFTER: "update the drafter too (/update_weights_from_tensor with selector draft)",
    LOAD: "none needed, drafting resumes with fewer requests at once (--max-running-requests, or more replicas)",
    FLOAT16: "use --dtype bfloat16, because hidden states of many targets overflow float16",
    QUANTISED_DRAFTER: "serve the unquantised drafter, without --speculative-draft-model-quantization",
    OTHER_TARGET: "set --speculative-draft-model-path to the drafter of this target",
    NO_SERVER_TEMPLATE: "add --chat-template FILE",
    NO_TEMPLATE: "send POST /v1/chat/completions, or render prompts with the target's chat template",
    THINKING[True]: 'send chat_template_kwargs: {"enable_thinking": false}',
    THINKING[False]: 'send chat_template_kwargs: {"enable_thinking": true}',
    CONTEXT: "shorten prompts (--context-length), or widen --speculative-draft-window-size",
    DRAFTER: "compare --speculative-draft-model-path, --speculative-draft-model-revision and --revision with the "
    "drafter's card",
    QUANTISED_TARGET: "serve the unquantised target, without --quantization",
    SAMPLING: "lower the temperature",
}

BREAK_EVEN = 1.5  # accept length from which a block pays; a published block of 8 costs 1.43 plain steps
ENOUGH = 256  # verified blocks needed for a judgement
RECOVERED = 1.2  # times the break-even accept length, for drafting to pay again
LOW = 0.7  # share of the expected accept length below which diagnose searches
GUESSING = 2.0  # tokens per step of a mismatched drafter


@dataclass
class Cause:
    """A likely cause, a key of :data:`FIXES`; evidence None marks a suspicion."""

    cause: str
    evidence: str | None = None
    remedy: str = ""

    def __post_init__(self) -> None:
        self.remedy = self.remedy or FIXES[self.cause]

    def __str__(self) -> str:
        return f"{self.cause}{f' ({self.evidence})' if self.evidence else ''}. Fix: {self.remedy}"
