"""Requests of trainers: which model they update, a drafter from disk, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.drafter.checkpoint import MASK_EMBEDDING, ModelFiles, plain_view
from sglang_dflash.drafter.formats import ARCHITECTURES, architecture
from sglang_dflash.drafter.tensors import load_mask_embedding
from sglang_dflash.errors import DFlashError, first, raise_first_error
from sglang_dflash.features import weights
from sglang_dflash.plan import serving
from sglang_dflash.plan.pair import Pair
from sglang_dflash.plan.pair_rules import PAIR_RULES
from sglang_dflash.plan.settings import Settings
from sglang_dflash.upstream.launch import get_server_args, resolving_view


def select_runners(result: list[tuple[str, Any]], _: Any, selector: str = "all") -> list[tuple[str, Any]]:
    """Hook after ``SchedulerWeightUpdaterManager._select_runners``: treat ``"all"`` as the target."""
    if selector != "all" or serving.plan is None:
        return result
    return [(role, runner) for role, runner in result if role == "target"]


def weights_by_name(result: Any, manager: Any, request: Any) -> Any:
    """Hook after ``get_weights_by_name``: ``draft.NAME`` is the drafter's parameter."""
    if serving.plan is not None and serving.plan.drafts:
        named = manager.draft_worker.weight_update_runners()[0][1].model.named_parameters(prefix="draft")
        if (found := dict(named).get(request.name)) is not None:
            result.parameter = found[: request.truncate_size].flatten(min(1, found.dim() - 1)).tolist()
    return result


def report_update(_: None, manager: Any, weight_version: str | None) -> None:
    """Hook after ``record_weight_version_after_update``: report to the worker which models were written."""
    for role in dict.fromkeys(weights.written):
        manager.draft_worker.weights_updated(role, weight_version)
    weights.written.clear()


def is_drafter(path: str) -> bool:
    try:
        return architecture(ModelFiles(path).config) in ARCHITECTURES
    except DFlashError:
        return False


def update_from_disk(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around the scheduler's ``update_weights_from_disk``: a drafter's folder updates the drafter."""
    if not ((plan := serving.plan) and plan.drafts and is_drafter(request.model_path)):
        return original(manager, request)
    from sglang_dflash.upstream.worker import UpdateWeightFromDiskReqOutput

    try:
        success, message = _load_drafter(plan, manager.draft_worker.weight_update_runners()[0][1], request)
    except DFlashError as error:
        success, message = False, str(error)
    if success:
        manager.record_weight_version_after_update(request.weight_version)
        success, message = manager.flush_cache_after_weight_update(request, success, message)
    return UpdateWeightFromDiskReqOutput(success=success, message=message)


def _load_drafter(plan: serving.ServingPlan, drafter: Any, request: Any) -> tuple[bool, str]:
    changes = {"speculative_draft_model_path": request.model_path, "speculative_draft_model_revision": None}
    settings = Settings(resolving_view(get_server_args())).changed(**changes)
    pair, masked = Pair.of(settings), drafter.model.vocabulary.mask_embedding
    raise_first_error(first(about, rule, settings, pair) for about, rule in PAIR_RULES.items())
    embedding = load_mask_embedding(pair.drafter_files.path(MASK_EMBEDDING), pair.drafter)
    served, found = plan.drafter.model_dump(exclude={"dtype"}), pair.drafter.model_dump()
    served[MASK_EMBEDDING], found[MASK_EMBEDDING] = masked is not None, embedding is not None
    for key, value in served.items():
        if found[key] != value:
            problem = f"{key} is {found[key]!r} in the drafter {request.model_path}"
            expected = f"{value!r}, as in the drafter that is served"
            raise DFlashError(problem, expected, remedy="restart the server with this drafter")
    folder, updater = str(plain_view(pair.loaded_files) or request.model_path), drafter.weight_updater
    success, message = updater.update_weights_from_disk(folder, request.load_format)
    if success and embedding is not None:
        masked.copy_(embedding)
    return success, message


def keep_target_path(original: Callable[..., None], manager: Any, model_path: str, load_format: str) -> None:
    """Hook around ``TokenizerManager._update_model_path_info``: keep the target's path after a drafter's update."""
    if not is_drafter(model_path):
        original(manager, model_path, load_format)


def resume_released(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around the scheduler's ``resume_memory_occupation``, which would end it if the memory was not released."""
    from sglang_dflash.upstream.worker import GPU_MEMORY_ALL_TYPES, ResumeMemoryOccupationReqOutput

    missing = set(request.tags or GPU_MEMORY_ALL_TYPES) - manager.offload_tags
    if serving.plan is None or not missing:
        return original(manager, request)
    problem = f"cannot resume {', '.join(sorted(missing))}: /release_memory_occupation was not called with these tags"
    return ResumeMemoryOccupationReqOutput(rid=problem)  # the only field that reaches the HTTP process


async def raise_refusal(_: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> None:
    """Hook around ``TokenizerManager.resume_memory_occupation``: turn a refusal into a 400."""
    manager.auto_create_handle_loop()
    for answer in await manager.resume_memory_occupation_communicator(obj):
        if answer.rid is not None:
            raise ValueError(answer.rid)
