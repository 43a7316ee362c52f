"""Hidden states that clients request: the target's last layer, and the drafter's input.

``"custom_params": {"hidden_states": "target_layers"}`` requests the states of ``target_layer_ids``.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from sglang_dflash.launch.plan import current
from sglang_dflash.upstream.hooks import Hooks

FIELD, TARGET_LAYERS = "hidden_states", "target_layers"


def wants_target_layers(req: Any) -> bool:
    params = req.sampling_params.custom_params
    return isinstance(params, dict) and params.get(FIELD) == TARGET_LAYERS


def return_last_layer(target: Any) -> None:
    """Make the target also return its last layer; before its graphs are captured."""
    for module in target.model.modules():
        if isinstance(module, LogitsProcessor) and get_exec().features.return_hidden_states_mode:
            module.keep_last_hidden_states = True


def for_clients(batch: Any, output: Any) -> Tensor | None:
    """Return the states that the scheduler copies to the host, or None.

    Args:
        output: the target's, with ``hidden_states`` [T, K * H] and ``last_hidden_states`` [T, H].

    Returns:
        [T, H]; [T, H + K * H] if a request wants the target layers. In a prefill T is 1 per request if the server's
            mode is ``last``.
    """
    if not batch.return_hidden_states or output.hidden_states is None:
        return None
    # without a drafter SGLang captures no other layer
    states = output.hidden_states if output.last_hidden_states is None else output.last_hidden_states
    if any(map(wants_target_layers, batch.reqs)):
        states = torch.cat((states, output.hidden_states), dim=-1)
    if batch.forward_mode.is_extend() and get_exec().features.return_hidden_states_mode == "last":
        last = [end - 1 for end in accumulate(batch.extend_lens)]
        return states[async_h2d(last, dtype=torch.int64, device=states.device)]
    return states.clone()


def own_columns(original: Callable[..., Any], *args: Any, req: Any, **options: Any) -> Any:
    """Hook around the functions of ``SchedulerBatchResultProcessor`` that append rows to ``req.hidden_states``."""
    if req.return_hidden_states:
        size = current.worker.plan.drafter.hidden_size or None
        columns = slice(size, None) if wants_target_layers(req) else slice(size)
        if output := options.get("logits_output"):
            options["logits_output"] = replace(output, hidden_states=output.hidden_states[:, columns])
        else:
            options["hidden_states"] = options["hidden_states"][:, columns]
    return original(*args, req=req, **options)


_RESULTS = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
HOOKS = Hooks(
    around={
        f"{_RESULTS}._append_prefill_hidden_states": own_columns,
        f"{_RESULTS}._append_decode_hidden_states": own_columns,
    }
)
