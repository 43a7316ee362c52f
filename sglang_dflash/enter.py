"""Hooks of each process of a server by its plan, and the worker class of a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dflash import __version__
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch import old_flags, resolution
from sglang_dflash.launch.launch import OUR_BACKEND
from sglang_dflash.launch.plan import Decision, ServingPlan, decision_of
from sglang_dflash.model import loading
from sglang_dflash.upstream import check_version, hooks
from sglang_dflash.upstream.hooks import Hooks, install
from sglang_dflash.upstream.names import HookRegistry

if TYPE_CHECKING:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dflash.upstream.names import ServerArgs


def enter_process(_: Any, __: Any, server_args: ServerArgs, *, role: str, **___: Any) -> None:
    """Hook after ``_configure_context``, which every process of a server calls with its arguments: install its hooks.

    It is private; ``publish`` calls it. Ray copies ``publish`` into its actors before they load plugins.
    """
    if role == "scheduler":
        hooks.register(SCHEDULER_HOOKS)
        HookRegistry.apply_hooks()
    if decision_of(server_args).plan is None:
        return
    from sglang_dflash.features import sglang_reports, streams, weight_updates

    if role == "tokenizer":
        install(sglang_reports.TOKENIZER_HOOKS, streams.TOKENIZER_HOOKS, weight_updates.TOKENIZER_HOOKS)
    elif role == "detokenizer":
        install(streams.DETOKENIZER_HOOKS)


def create_worker(original: Callable[..., type], algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type:
    """Hook around ``SpeculativeAlgorithm.create_worker``: return our class, with its hooks installed, for a plan."""
    if algorithm.is_dflash():
        decided = decision_of(server_args)
        if server_args.nnodes > 1:
            compare_nodes(decided)
        if decided.plan is not None:
            enter_scheduler(decided.plan)
            return import_worker()
        if decided.reason is None:
            resolution.leave(server_args, "its arguments were resolved in a process without the plugin dflash")
    return original(algorithm, server_args)


def compare_nodes(decided: Decision) -> None:
    """Raise DFlashError if the nodes of a server decided different plans, which would deadlock."""
    from sglang.srt.distributed.parallel_state import get_world_group

    mine = {"version": __version__, "SGLang's worker": decided.reason}
    if decided.plan is not None:
        mine |= {**vars(decided.plan), "files": None}  # folders may differ
    ranks = get_world_group().all_gather_object({name: repr(value) for name, value in mine.items()})
    for name in mine:
        if len(values := dict.fromkeys(rank.get(name, "") for rank in ranks)) > 1:
            problem = f"the nodes have different plans: {name} is {' and '.join(values)}"
            remedy = "start every node with the same flags, SGLANG_DFLASH variables, drafter and packages"
            raise DFlashError(problem, remedy)


HOOKS = Hooks(  # in every process, before the plan exists
    before={
        "configs.model_config.ModelConfig.__init__": loading.override_drafter,
        "configs.model_config.ModelConfig._derive_context_length": loading.lift_context,
    },
    around={"speculative.spec_info.SpeculativeAlgorithm.create_worker": create_worker},
    after={
        "server_args.ServerArgs.add_cli_args": old_flags.accept_old_flags,
        "runtime_context._configure_context": enter_process,
    },
)
_PARTS = "model_executor.model_runner_components"
SCHEDULER_HOOKS = Hooks(  # with SGLang's own worker too; importing their targets initialises a GPU
    around={
        f"{_PARTS}.attention_backend_setup.configure_aux_hidden_state_capture": loading.capture_layers,
        f"{_PARTS}.spec_aux_hidden_state._resolve_dflash_aux_hidden_state": loading.capture_without_drafter,
    }
)


def enter_scheduler(plan: ServingPlan) -> None:
    """Install the hooks of the features that a plan has, in a scheduler."""
    from sglang.srt.runtime_context import get_exec

    from sglang_dflash.features import hidden, pool_sizes, ranks, requests, streams, tails, transfer, window
    from sglang_dflash.features import sglang_reports as reports
    from sglang_dflash.features import verify_attention as attention
    from sglang_dflash.features import weight_updates as updates
    from sglang_dflash.features.exact import rows, stepped
    from sglang_dflash.states import replay, verify
    from sglang_dflash.step import draft_state
    from sglang_dflash.worker.start import graphs

    tables = {
        requests.HOOKS: True,
        streams.HOOKS: True,
        reports.HOOKS: True,
        reports.WIDTH_HOOKS: plan.widths is not None,
        draft_state.HOOKS: True,
        graphs.HOOKS: True,
        updates.HOOKS: True,
        hidden.HOOKS: get_exec().features.return_hidden_states_mode,
        attention.HOOKS: plan.verify_attention,
        rows.HOOKS: plan.exact,
        stepped.HOOKS: plan.exact and plan.replay,
        verify.HOOKS: plan.replay and not plan.exact,
        replay.HOOKS: plan.replay,
        pool_sizes.HOOKS: plan.replay,
        window.HOOKS: plan.window is not None,
        tails.HOOKS: plan.window is not None and plan.window.cached,
        transfer.RING_HOOKS: plan.window is not None and plan.role != "null",
        transfer.HOOKS: plan.role == "decode",
        ranks.HOOKS: plan.groups > 1 and plan.widths is not None,
    }
    install(*(table for table, applies in tables.items() if applies))


def import_worker() -> type:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.registry import ModelRegistry

    from sglang_dflash.drafter.formats import ARCHITECTURES
    from sglang_dflash.model.backend import BlockAttention
    from sglang_dflash.model.drafter import DFlashDraftModel
    from sglang_dflash.worker.worker import DFlashWorker

    check_version()
    resolution.accept_our_backend()
    register_attention_backend(OUR_BACKEND)(BlockAttention)
    # the registry imports all of SGLang's models (3 s)
    ModelRegistry.models.update(dict.fromkeys(ARCHITECTURES, DFlashDraftModel))
    return DFlashWorker
