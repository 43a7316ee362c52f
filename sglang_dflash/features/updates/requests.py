"""Requests of trainers: a drafter's folder as an update, and refusals that reach the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.drafter.checkpoint import MASK_EMBEDDING, ModelFiles, plain_view
from sglang_dflash.drafter.formats import ARCHITECTURES, architecture
from sglang_dflash.drafter.tensors import load_mask_embedding
from sglang_dflash.errors import DFlashError, raise_first_error
from sglang_dflash.launch.asked import Launch
from sglang_dflash.launch.device import UNKNOWN_GPU
from sglang_dflash.launch.pair_rules import DRAFTER_RULES
from sglang_dflash.launch.plan import current
from sglang_dflash.launch.rules import judge
from sglang_dflash.launch.settings import Settings
from sglang_dflash.upstream.hooks import Hooks
from sglang_dflash.upstream.launch import get_server_args, resolving_view


def is_drafter(path: str) -> bool:
    try:
        return architecture(ModelFiles(path).config) in ARCHITECTURES
    except DFlashError:
        return False


def load_drafter(drafter: Any, request: Any) -> tuple[bool, str]:
    """Load the folder of an ``UpdateWeightFromDiskReqInput`` into the drafter's runner; return success and message."""
    path, mask = request.model_path, drafter.model.vocabulary.mask_embedding
    plan, settings = current.worker.plan, Settings(resolving_view(get_server_args()))
    changes = {"speculative_draft_model_path": path, "speculative_draft_model_revision": None}
    launch = Launch.of(settings.changed(**changes, speculative_adaptive=plan.widths is not None), UNKNOWN_GPU)
    try:
        raise_first_error(judge(launch, DRAFTER_RULES))
        embedding = load_mask_embedding(launch.drafter_files.path(MASK_EMBEDDING), launch.drafter)
    except DFlashError as error:
        return False, str(error)
    served, found = plan.drafter.model_dump(exclude={"dtype"}), launch.drafter.model_dump()
    served[MASK_EMBEDDING], found[MASK_EMBEDDING] = mask is not None, embedding is not None
    for key, value in served.items():
        if found[key] != value:
            problem = f"{key} is {found[key]!r} in the drafter {path}, and {value!r} in the served drafter"
            return False, str(DFlashError(problem, remedy="restart the server with this drafter"))
    folder = str(plain_view(launch.loaded_files) or path)
    success, message = drafter.weight_updater.update_weights_from_disk(folder, request.load_format)
    if success and embedding is not None:
        mask.copy_(embedding)
    return success, message


def keep_target_path(original: Callable[..., None], manager: Any, model_path: str, load_format: str) -> None:
    """Hook around ``TokenizerManager._update_model_path_info``: keep the target's path after a drafter's update."""
    if not is_drafter(model_path):
        original(manager, model_path, load_format)


async def raise_refusal(_: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> None:
    """Hook around ``TokenizerManager.resume_memory_occupation``: turn a refusal into a 400."""
    manager.auto_create_handle_loop()
    for answer in await manager.resume_memory_occupation_communicator(obj):
        if answer.rid is not None:
            raise ValueError(answer.rid)


_TOKENIZER = "managers.tokenizer_manager.TokenizerManager"
TOKENIZER_HOOKS = Hooks(
    around={
        f"{_TOKENIZER}._update_model_path_info": keep_target_path,
        f"{_TOKENIZER}.resume_memory_occupation": raise_refusal,
    }
)
