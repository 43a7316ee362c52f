"""The scenarios: engines, requests, and what each rehearsal must have met."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from sglang_dflash.launch.settings import ONE_FORWARD_SWITCH as ONE_FORWARD
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.families.pairs import TARGETS, VOCAB, build
from tests.rehearsal.install import PREFILL_GRAPHS
from tests.support.preloaded import WIDTHS
from tests.support.prompts import corpus
from tests.support.quantised import write_quantised

Request = dict[str, Any]
GREEDY = {"temperature": 0, "ignore_eos": True}
_SHARED = {"dtype": "float32", "log_level": "warning", "max_running_requests": 4, "max_total_tokens": 2048}
_RECURRENT = {"max_mamba_cache_size": 32, "mamba_track_interval": 64}
_SNAPSHOTS = {"mamba_radix_cache_strategy": "extra_buffer"}
_CHUNKED = {"chunked_prefill_size": 32, "enable_mixed_chunk": True}


@dataclass(frozen=True)
class Scenario:
    """One engine and its requests, run on the torch platform and in a rehearsal.

    Attributes:
        name: what it is about.
        pair: the shipped pair, or the family of a random one.
        requests: arguments of ``Engine.generate``, one call after the other.
        drafter: that of the pair; None for copies alone.
        met: what the rehearsal must have counted, such as "replays: target 4" (:data:`tests.rehearsal.report.MET`).
        width: of the block.
        graphs: batch sizes that are captured.
        options: further arguments of the engine.
        environment: further variables, for both platforms.
        plain: whether it is compared with the rehearsal's own plain decoding instead.
        exact: whether log-probabilities are compared too, bit by bit.
        quantised: whether a rehearsal serves the drafter in block FP8, and the torch platform its plain weights.
        same_blocks: whether every request must take the same number of blocks on both platforms; False where a
            retraction depends on when requests arrive.
        attention: SGLang's backend for the target, in the rehearsal.
        draft_attention: the drafter's; by default that of a GPU with the target's (:mod:`tests.rehearsal.backends`).
    """

    name: str
    pair: str
    requests: tuple[Request, ...]
    met: tuple[str, ...]
    drafter: str | None = "good"
    width: int = 8
    graphs: tuple[int, ...] = (1, 4)
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    plain: bool = False
    exact: bool = False
    quantised: bool = False
    same_blocks: bool = True
    attention: str = "triton"
    draft_attention: str = ""

    def keywords(self, *, plain: bool = False, rehearse: bool = False) -> dict[str, Any]:
        """Arguments of ``sglang.Engine``, for ``plain`` decoding without those of speculation."""
        drafter = None if self.drafter is None else str(_folder(self.pair, self.drafter))
        if self.quantised:
            drafter = str(_written(self.pair) / ("quantised" if rehearse else "plain"))
        keywords = {
            **_SHARED,
            **(_RECURRENT if self.pair == HYBRID else {}),
            "model_path": str(_folder(self.pair, None)),
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": drafter,
            "speculative_num_draft_tokens": self.width,
            "cuda_graph_bs_decode": list(self.graphs),
            **self.options,
        }
        return {name: value for name, value in keywords.items() if not (plain and name.startswith("speculative"))}


def _folder(pair: str, drafter: str | None) -> Path:
    if pair in TARGETS:
        return _written(pair) / ("target" if drafter is None else "drafter")
    return target_path(pair) if drafter is None else drafter_path(pair, drafter)


_BUILDING = Lock()
_WRITTEN: dict[str, Path] = {}


def _written(pair: str) -> Path:
    """The folder of a family's random pair, or of a shipped pair's drafter in both forms."""
    with _BUILDING:  # both platforms' threads come here
        if pair not in _WRITTEN:
            folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
            build(pair, folder) if pair in TARGETS else write_quantised(folder, pair)
            _WRITTEN[pair] = folder
        return _WRITTEN[pair]


def ask(
    pair: str,
    number: int,
    tokens: int = 6,
    *,
    growth: int = 12,
    seed: int = 0,
    repeat: int = 1,
    cut: int | None = None,
    **sampling: Any,
) -> Request:
    """``number`` prompts; each asks for more tokens than the one before, so that a batch shrinks as it goes on.

    Args:
        growth: tokens more.
        repeat: each prompt is that many times the same text.
        cut: only the last tokens of each prompt.
    """
    if pair in TARGETS:
        draw = random.Random(seed)
        texts = [draw.choices(range(10, VOCAB), k=40 + 7 * row) for row in range(number)]
    else:
        texts = corpus(pair, number, seed, shape="single")
    prompts = [(text * repeat)[-(cut or 0) :] for text in texts]
    params = [{**GREEDY, "max_new_tokens": tokens + growth * row, **sampling} for row in range(number)]
    return {"input_ids": prompts, "sampling_params": params}


def adjusted(request: Request) -> Request:
    """The same with a penalty on the first row and a seed on the second."""
    changes: tuple[Request, ...] = ({"frequency_penalty": 0.4}, {"temperature": 0.9, "sampling_seed": 11})
    first, second, *others = request["sampling_params"]
    return request | {"sampling_params": [first | changes[0], second | changes[1], *others]}


def _features(pair: str) -> tuple[Request, ...]:
    """Return requests for every parameter that runs another kernel or another part of the worker."""
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    seeded = {"temperature": 0.9, "sampling_seed": 11}
    rows = (penalties, seeded, seeded | {"top_p": 0.9, "top_k": 40, "min_p": 0.02}, {"logit_bias": {"5": 4.0}})
    mixed = ask(pair, 4)
    mixed["sampling_params"] = [params | row for params, row in zip(mixed["sampling_params"], rows, strict=True)]
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    return (
        mixed | {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1},
        ask(pair, 2, 8, seed=1, json_schema=schema, ignore_eos=False),
    )


def measured(request: Request) -> Request:
    """The same with log-probabilities of four tokens at every new position."""
    return {**request, "return_logprob": True, "top_logprobs_num": 4, "logprob_start_len": -1}


DENSE, HYBRID = "tiny-dense", "tiny-hybrid"
# For two rows: each is taken twice, and the longer answers cross a track boundary.
TURNS = ask(HYBRID, 4, 4, growth=8, repeat=3, cut=110)
_REPLAYED = ("replays: target 4", "replays: drafter 4")
_PADDED = (*_REPLAYED, "replays: target 1", "replays: drafter 1")
_SNAPSHOT = "launches: sglang.kernels.ops.mamba.mamba_state_scatter_triton.track_mamba_state_if_needed_kernel"
_KERNELS = "launches: sglang_dflash.states.kernels."
_CONVOLVED = "launches: sglang_dflash.states.convolution.gdn_convolve_kernel"
_STATES_REPLAYED = (*(f"{_KERNELS}{name}_kernel" for name in ("gdn_verify", "gdn_commit")), _CONVOLVED)
RANDOM_WIDTHS = {"speculative_adaptive": True, "speculative_adaptive_config": str(WIDTHS / "random_width.json")}
# A forward of the batch-invariant products takes seconds under the interpreter: few tokens, and a patient watchdog.
ONE_WIDTH = {"speculative_adaptive": True, "speculative_adaptive_config": str(WIDTHS / "8.json")}
EXACT = {"dtype": "bfloat16", "enable_deterministic_inference": True, "watchdog_timeout": 3600}
_STEPPED = (
    "launches: sglang.kernels.ops.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode_kernel"
)
_ALL_WIDTHS = ("widths: target 1", *(f"widths: {who} {w}" for who in ("target", "drafter") for w in (2, 4, 8, 12, 16)))
_SOME_WIDTHS = ("widths: target 1", "widths: drafter 4")
DRAFT_WINDOW = {"speculative_draft_window_size": 32}
_PAGED = {"page_size": 16, "chunked_prefill_size": 32, **DRAFT_WINDOW}
_OURS = "launches: sglang_dflash.ops.kernels."
_CHOICES = tuple(f"{_OURS}sampling.{op}_kernel" for op in ("penalize_block", "race"))
_COPIES = tuple(f"{_OURS}copies.{op}_kernel" for op in ("match_copies", "take_copies"))
_FP8_PRODUCT = "launches: sglang.kernels.ops.gemm.fp8_kernel._w8a8_block_fp8_matmul"
_ATTENTION = tuple(f"{_OURS}attention.{op}_kernel" for op in ("attend_block", "reduce_parts"))
_DFLASH2 = tuple(f"{_OURS}model.{op}_kernel" for op in ("convolve_block", "walk_candidates"))

SCENARIOS: tuple[Scenario, ...] = (
    # `make test` runs a smaller one, without copies (SHORT).
    Scenario(
        "dense", DENSE, (adjusted(ask(DENSE, 3)),), (*_PADDED, *_CHOICES, *_COPIES, *_ATTENTION), options=ONE_WIDTH
    ),
    Scenario(
        "requests: penalties, seeds, filters, bias, log-probabilities, grammar", DENSE, _features(DENSE), _CHOICES
    ),
    Scenario(
        "widths at random; more than the largest graph",
        DENSE,
        (ask(DENSE, 5, 12, cut=24),),
        (*_ALL_WIDTHS, *(f"eager widths: {who}" for who in ("target 1", "target 4", "drafter 4"))),
        width=16,
        graphs=(1, 2, 3, 4),
        options={**RANDOM_WIDTHS, "max_running_requests": 5},
    ),
    *(
        Scenario(
            name,
            pair,
            (ask(pair, number),),
            ("replays: target 4", "events: mixed batches"),
            options={"page_size": 16, **_CHUNKED, **options},
            same_blocks=False,
        )
        for name, pair, number, options in (
            ("pages of 16, draft window, chunked prefill, mixed batches", DENSE, 4, DRAFT_WINDOW),
            ("hybrid: pages of 16, chunked prefill, mixed batches", HYBRID, 3, {}),
        )
    ),
    Scenario(
        "retraction",
        DENSE,
        (ask(DENSE, 4, 16, cut=24),),
        ("events: retracted",),
        environment={"SGLANG_TEST_RETRACT": "1"},
        same_blocks=False,
    ),
    Scenario("hybrid", HYBRID, (ask(HYBRID, 3),), (*_PADDED, *_STATES_REPLAYED)),
    *(
        Scenario(
            f"hybrid: prefix hits, states across track boundaries (extra_buffer){name}",
            HYBRID,
            (ask(HYBRID, 1, 12, repeat=3, cut=120),) * 2,
            ("events: track boundaries", *_STATES_REPLAYED, "events: cached tokens", *met),
            options={**_SNAPSHOTS, **options},
        )
        for name, met, options in (("", (), {}), (", widths at random", _SOME_WIDTHS, RANDOM_WIDTHS))
    ),
    Scenario(
        "hybrid: widths at random, copies, states across track boundaries (extra_buffer), draft window",
        HYBRID,
        tuple(map(adjusted, (ask(HYBRID, 2, 24, repeat=3, cut=100),) * 2)),
        (
            *(*_ALL_WIDTHS, *_STATES_REPLAYED, *_CHOICES, *_COPIES, _SNAPSHOT),
            *("widths: target 32", "events: cached tokens"),
        ),
        width=32,
        graphs=(3,),
        options={**RANDOM_WIDTHS, **_SNAPSHOTS, **DRAFT_WINDOW},
    ),
    Scenario(
        "hybrid: copies alone, widths at random",
        HYBRID,
        (ask(HYBRID, 2, 24, repeat=3, cut=100),),
        (*_STATES_REPLAYED, *_COPIES, *(f"widths: target {w}" for w in (1, 2, 4, 8))),
        drafter=None,
        graphs=(2,),
        options={**RANDOM_WIDTHS, "max_running_requests": 2},
    ),
    *(
        Scenario(
            f"hybrid: {name}, rows turn over",
            HYBRID,
            (TURNS,) * 2,
            (*_STATES_REPLAYED, "events: cached tokens", *met),
            width=8,
            graphs=(2,),
            # Rows end and begin within the steps that the scheduler overlaps.
            options={"max_running_requests": 2, **_SNAPSHOTS, **options},
            drafter=drafter,
        )
        for name, drafter, met, options in (
            ("prefix hits, draft window", "good", (), DRAFT_WINDOW),
            ("widths at random", "good", _SOME_WIDTHS, RANDOM_WIDTHS),
            (
                "DFlash2, widths at random, draft window",
                "dflash2",
                (*_SOME_WIDTHS, *_DFLASH2),
                {**RANDOM_WIDTHS, **DRAFT_WINDOW},
            ),
        )
    ),
    Scenario(
        "hybrid: interleaved causal drafter, draft window, width 16",
        HYBRID,
        (ask(HYBRID, 2),),
        _REPLAYED,
        drafter="interleaved",
        width=16,
        graphs=(4,),
        options=DRAFT_WINDOW,
    ),
    Scenario(
        "hybrid: prefill as breakable graphs",
        HYBRID,
        (ask(HYBRID, 2),),
        (*_REPLAYED, "replays: prefill"),
        graphs=(4,),
        environment={PREFILL_GRAPHS: "160"},  # only a rehearsal reads it
        options={"disable_radix_cache": True},
    ),
    Scenario("bfloat16", HYBRID, (ask(HYBRID, 2),), _REPLAYED, graphs=(4,), options={"dtype": "bfloat16"}),
    Scenario(
        "a drafter in block FP8",
        DENSE,
        (ask(DENSE, 2),),
        (*_REPLAYED, _FP8_PRODUCT),
        graphs=(4,),
        options={"dtype": "bfloat16"},
        quantised=True,
    ),
    *(
        Scenario(
            f"{family}: {name}",
            family,
            (ask(family, 2, 12, growth=2),) * 2,
            ("replays: target 2", "replays: drafter 2", "events: cached tokens", *_COPIES[:1], *met),
            graphs=(2,),
            options={
                **ONE_WIDTH,
                "max_running_requests": 2,
                "skip_tokenizer_init": True,
                "watchdog_timeout": 3600,
                **options,
            },
            same_blocks=same,
        )
        for family, name, met, same, options in (
            ("gpt_oss", "widths at random", _SOME_WIDTHS, True, {**RANDOM_WIDTHS, "swa_full_tokens_ratio": 0.25}),
            ("gpt_oss", "pages of 16, chunked prefill, draft window", (), False, _PAGED),
            ("gemma4_text", "two shapes of K/V", (), True, {}),
            ("deepseek_v3", "widths at random", _SOME_WIDTHS[1:], True, RANDOM_WIDTHS),
        )
    ),
    *(
        Scenario(
            f"exact: bfloat16, deterministic, {name}",
            HYBRID,
            requests,
            (_STEPPED, _CONVOLVED, "replays: target 2", *met),
            width=4,
            graphs=(2,),
            options={**EXACT, **options},
            plain=True,
            exact=True,
        )
        for name, requests, met, options in (
            (
                "width 4, graphs of half the requests",  # the commit's first calls need all
                (measured(ask(HYBRID, 2, 6, growth=1, cut=24)),),
                (),
                {},
            ),
            (
                "widths at random, copies, prefix hits, track boundaries",
                (measured(ask(HYBRID, 2, 6, growth=1, repeat=3, cut=124)),) * 2,
                (*_COPIES, _SNAPSHOT, "events: cached tokens"),
                {**RANDOM_WIDTHS, "max_running_requests": 2},
            ),
        )
    ),
)


def one_forward(scenario: Scenario) -> Scenario:
    """The same where the drafter's graphs are replayed without SGLang's runner."""
    environment, met = {**scenario.environment, ONE_FORWARD: "1"}, (*scenario.met, "replayed by: DraftGraphs")
    return replace(scenario, name=f"one forward: {scenario.name}", environment=environment, met=met)


# --- SGLang's attention of other GPUs

SHORT = replace(
    SCENARIOS[0],
    requests=(adjusted(ask(DENSE, 2, 4, growth=4, cut=28)),),
    met=("replays: target 2", "replays: drafter 2", *_CHOICES, *_ATTENTION),
    width=4,
    graphs=(2,),
    options={"max_running_requests": 2},
)
# Of Hopper; of Ampere, Ada and sm_120; of sm_100.
BACKENDS = ("fa3", "flashinfer", "trtllm_mha")
_RUNS = {
    "fa3": "launches: tests.rehearsal.flash.flash_attention",
    "flashinfer": "launches: tests.rehearsal.flashinfer_kernels.flashinfer_paged",
    "trtllm_mha": "launches: tests.rehearsal.flashinfer_kernels.trtllm_paged",
}


def on(scenario: Scenario, attention: str, draft_attention: str = "", *, page: int = 16) -> Scenario:
    """The same in other attention backends. trtllm_mha has pages: 64 slots by default, 16 at least."""
    ours = attention == "flashinfer" and not draft_attention
    met = (_RUNS[attention], *(each for each in scenario.met if ours or each not in _ATTENTION))
    options = {**({"page_size": page} if attention == "trtllm_mha" else {}), **scenario.options}
    backends = {"attention": attention, "draft_attention": draft_attention, "options": options}
    name = f"{attention}{f' and {draft_attention}' if draft_attention else ''}: {scenario.name}"
    return replace(scenario, name=name, met=met, **backends)


SHORT_ROWS = (*(on(SHORT, each, page=64) for each in BACKENDS), on(SHORT, "flashinfer", "flashinfer"))
_HITS = ask(DENSE, 3, 10, growth=6, cut=40)
TWICE = Scenario(
    "widths at random, copies, prefix hits, more than the largest graph",
    DENSE,
    (_HITS, adjusted(_HITS)),
    (*_SOME_WIDTHS, *_COPIES, "events: cached tokens", "eager: target 3", "replays: target 2"),
    width=16,
    graphs=(2,),
    options={**RANDOM_WIDTHS, "max_running_requests": 3},
)
TO_THE_END = Scenario(
    "to the end of the context",
    DENSE,
    (ask(DENSE, 2, 30, growth=15, seed=3, repeat=3, cut=50),),
    ("replays: target 2",),
    width=16,
    graphs=(2,),
    options={"context_length": 96, "max_running_requests": 2},
)
WINDOW = Scenario(
    "draft window, pages of 16, prefix hits",
    DENSE,
    (_HITS,) * 2,
    ("replays: target 3", "events: cached tokens"),
    graphs=(3,),
    options={"page_size": 16, "max_running_requests": 3, **DRAFT_WINDOW},
)
# A kernel that reads FP8 keys has FP8 queries, which the CPU platform's has not.
FP8 = Scenario(
    "K/V in FP8, prefix hits",
    DENSE,
    (_HITS,) * 2,
    ("replays: target 3", "events: cached tokens"),
    graphs=(3,),
    options={"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "max_running_requests": 3},
    plain=True,
)
_ALSO = (
    "pages of 16, draft window, chunked prefill, mixed batches",
    "retraction",
    "hybrid",
    "hybrid: prefix hits, draft window, rows turn over",
    "hybrid: DFlash2, widths at random, draft window, rows turn over",
    "gpt_oss: widths at random",
    "gpt_oss: pages of 16, chunked prefill, draft window",
)
BACKEND_SCENARIOS = (
    *(
        on(scenario, attention)
        for attention in BACKENDS
        for scenario in (TWICE, TO_THE_END, WINDOW, *(each for each in SCENARIOS if each.name in _ALSO))
        if (attention, scenario.pair) != ("flashinfer", "gpt_oss")  # refused: its verify ignores the window
    ),
    on(FP8, "fa3"),
)


# While SGLang's graph runner serves the drafter by default.
ONE_FORWARD_SCENARIOS = tuple(one_forward(each) for each in SCENARIOS if each.drafter and not each.exact)
