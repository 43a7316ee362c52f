"""Which hooks each process of a server gets because of its plan, and the worker class of a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.launch import told
from sglang_dflash.launch.asked import OUR_BACKEND
from sglang_dflash.launch.plan import ServingPlan
from sglang_dflash.upstream import check_version, hooks, read_record
from sglang_dflash.upstream.hooks import Hooks, install
from sglang_dflash.upstream.launch import load_plugins

if TYPE_CHECKING:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dflash.upstream.launch import ServerArgs


def around_speculation(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_speculative_decoding``: as :func:`told.around_speculation`, in this process."""
    if told.around_speculation(server_args, previous) is not None:
        enter_tokenizer()


def choose_worker(original: Callable[..., type], algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type:
    """Hook around ``SpeculativeAlgorithm.create_worker``: return our class for DFLASH."""
    # the CPU platform calls `worker_for`
    ours = worker_for(server_args) if algorithm.is_dflash() and not told.on_our_cpu_platform() else None
    return ours or original(algorithm, server_args)


def worker_for(server_args: ServerArgs) -> type | None:
    """Return our worker class, with its hooks installed, or None; DFlashError for a launch without this package."""
    decided = read_record(server_args)
    if isinstance(decided, ServingPlan):
        enter_scheduler(decided)
        return our_worker()
    if not isinstance(decided, str):
        raise DFlashError(
            "the server arguments hold no DFLASH plan",
            expected="the plan that sglang-dflash makes in the launching process",
            remedy="install sglang-dflash where the server is launched too, in the same version",
        )
    return None


def enter_scheduler(plan: ServingPlan) -> None:
    """Install the hooks of the features that a plan has, in a scheduler."""
    from sglang.srt.runtime_context import get_exec

    from sglang_dflash.features import hidden, pools, ranks, reports, requests, streams, tails, transfer, window
    from sglang_dflash.features import verify_attention as attention
    from sglang_dflash.features.exact import rows, stepped
    from sglang_dflash.features.updates import writes
    from sglang_dflash.states import replay, verify
    from sglang_dflash.step import state
    from sglang_dflash.worker.start import graphs

    tables = {
        requests.HOOKS: True,
        streams.HOOKS: True,
        reports.HOOKS: True,
        reports.WIDTH_HOOKS: plan.widths is not None,
        state.HOOKS: True,
        graphs.HOOKS: True,
        writes.HOOKS: True,
        hidden.HOOKS: get_exec().features.return_hidden_states_mode,
        attention.HOOKS: plan.verify_attention,
        rows.HOOKS: plan.exact,
        stepped.HOOKS: plan.exact and plan.hybrid,
        verify.RECORDED: plan.replay and not plan.exact,
        verify.KEPT: plan.hybrid and not (plan.replay or plan.exact),
        replay.HOOKS: plan.hybrid,
        pools.HOOKS: plan.replay,
        window.HOOKS: plan.window is not None,
        tails.HOOKS: plan.window is not None and plan.window.cached,
        transfer.RING_HOOKS: plan.window is not None and plan.role != "null",
        transfer.HOOKS: plan.role == "decode",
        ranks.HOOKS: plan.groups > 1 and plan.widths is not None,
    }
    install(*(table for table, applies in tables.items() if applies))


def enter_tokenizer() -> None:
    """Install the hooks of a process that parses answers."""
    from sglang_dflash.features import reports, streams
    from sglang_dflash.features.updates import requests as updates

    install(reports.TOKENIZER_HOOKS, streams.TOKENIZER_HOOKS, updates.TOKENIZER_HOOKS, _WORKER_HOOKS)


class _LoadsPlugins(dict[str, Any]):
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, Any]]]:
        return _after_plugins, (dict(self),)


def _after_plugins(info: dict[str, Any]) -> dict[str, Any]:
    load_plugins()
    enter_tokenizer()
    return info


def enter_tokenizer_workers(port_args: Any, server_args: Any, scheduler_info: dict[str, Any]) -> tuple[Any, Any]:
    """Hook before ``write_data_for_multi_tokenizer``: its pickle installs hooks in the processes that read it."""
    return (port_args, server_args, _LoadsPlugins(scheduler_info)), {}


_WORKER_HOOKS = Hooks(before={"managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer": enter_tokenizer_workers})


def enter_detokenizer(_: Any, server_args: ServerArgs, *__: Any, **___: Any) -> None:
    """Hook before ``DetokenizerManager.__init__``: install the hooks of its process, if our worker serves."""
    from sglang_dflash.features import streams

    if isinstance(read_record(server_args), ServingPlan):
        install(streams.DETOKENIZER_HOOKS)


def our_worker() -> type:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.registry import ModelRegistry

    from sglang_dflash.drafter.formats import ARCHITECTURES
    from sglang_dflash.model.backend import BlockAttention
    from sglang_dflash.model.drafter import DFlashDraftModel
    from sglang_dflash.worker.worker import DFlashWorker

    check_version()
    hooks.check()
    told.accept_our_backend()
    register_attention_backend(OUR_BACKEND)(BlockAttention)
    # the registry imports all of SGLang's models (3 s)
    ModelRegistry.models.update(dict.fromkeys(ARCHITECTURES, DFlashDraftModel))
    return DFlashWorker
