"""Weight updates of a running server: of the selected model only, and errors where SGLang would stop the server."""

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqOutput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqOutput,
    UpdateWeightsFromTensorReqOutput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.runtime_context import get_serving
from sglang.srt.utils.weight_versions import WeightVersionEvent

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.formats import ARCHITECTURES, architecture
from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream.hooks import Hooks

logger = logging.getLogger(__name__)


class Updates(SchedulerWeightUpdaterManager):
    """A scheduler's updates of a target and its drafter."""

    _written: list[str]  # roles of the latest update

    def _select_runners(self, selector: str = "all") -> list[tuple[str, Any]]:
        """Treat ``"all"`` as the target."""
        selected = super()._select_runners("target" if selector == "all" else selector)
        self._written = [role for role, _ in selected]
        return selected

    def record_weight_version_after_update(self, weight_version: str | None) -> None:
        """Called after each successful update."""
        super().record_weight_version_after_update(weight_version)
        for role in self._written:
            self.draft_worker.weights_updated(role, weight_version)

    def begin_weight_update(self, recv_req: Any) -> Any:
        """Refuse a quantised drafter: after a load its layers hold its weights in the form of their kernels."""
        for role, runner in self._select_runners(recv_req.selector):
            if role == "draft" and (method := runner.model_config.quantization):
                problem = f"the drafter is quantised ({method}) and cannot be updated: restart the server with another"
                return BeginWeightUpdateReqOutput(success=False, message=problem)
        return super().begin_weight_update(recv_req)

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        """Refuse a drafter's folder."""
        if problem := refused_folder(recv_req.model_path):
            return UpdateWeightFromDiskReqOutput(success=False, message=problem)
        return _or_error(super().update_weights_from_disk, recv_req, UpdateWeightFromDiskReqOutput)

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return _or_error(super().update_weights_from_tensor, recv_req, UpdateWeightsFromTensorReqOutput)

    def resume_memory_occupation(self, recv_req: Any) -> Any:
        """Refuse to resume memory that was not released, which would end the scheduler."""
        missing = set(recv_req.tags or GPU_MEMORY_ALL_TYPES) - self.offload_tags
        if not missing:
            return super().resume_memory_occupation(recv_req)
        tags = ", ".join(sorted(missing))
        problem = f"cannot resume {tags}: /release_memory_occupation was not called with these tags"
        return ResumeMemoryOccupationReqOutput(rid=problem)  # the HTTP process receives no other field


def refused_folder(path: str) -> str | None:
    """Return why ``/update_weights_from_disk`` refuses a folder, or None.

    The target's loader would skip every tensor of a drafter, and report success.
    """
    try:
        if architecture(ModelFiles(path).config) not in ARCHITECTURES:
            return None
    except DFlashError:
        return None
    return (
        f"{path} is a drafter, and a folder updates the target. Send the drafter's tensors with selector draft to "
        "/update_weights_from_tensor, or restart the server with this drafter"
    )


def _or_error(update: Callable[[Any], Any], request: Any, answer: type[Any]) -> Any:
    """Return an error for tensors that do not fit. From disk, SGLang raises when it rolls back to the failed folder."""
    try:
        return update(request)
    except Exception as error:  # process edge: a client's tensors
        logger.exception("DFLASH: a weight update failed; the tensors before the error are written")
        return answer(success=False, message=f"{type(error).__name__}: {error}")


def label_launched_tokens(original: Callable[..., None], scheduler: Any, new_version: str | None) -> None:
    """Hook around ``Scheduler.record_weight_version_change``: tokens of a launched step have the old version."""
    old_version = get_serving().weight_version
    original(scheduler, new_version)
    if get_serving().weight_version == old_version or not scheduler.enable_overlap:
        return
    for batch, result in scheduler.result_queue:
        result.copy_done.synchronize()
        lengths = [1] * len(batch.reqs) if result.accept_lens is None else result.accept_lens.tolist()
        for req, tokens in zip(batch.reqs, lengths, strict=True):
            if req.finished() or req.inflight_middle_chunks > 0:
                continue
            if req.output_ids:
                req.weight_version_events.pop()  # without the launched step
            event = WeightVersionEvent(old_version=old_version, num_output_tokens=len(req.output_ids) + tokens)
            req.weight_version_events.append(event)


async def raise_refusal(_: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> None:
    """Hook around ``TokenizerManager.resume_memory_occupation``: turn a refusal into a 400."""
    manager.auto_create_handle_loop()
    for answer in await manager.resume_memory_occupation_communicator(obj):
        if answer.rid is not None:
            raise ValueError(answer.rid)


HOOKS = Hooks(
    around={"managers.scheduler.Scheduler.record_weight_version_change": label_launched_tokens},
    values={"managers.scheduler.SchedulerWeightUpdaterManager": Updates},
)
TOKENIZER_HOOKS = Hooks(around={"managers.tokenizer_manager.TokenizerManager.resume_memory_occupation": raise_refusal})
