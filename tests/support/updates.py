"""Updates of a server's weights, as a trainer makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer

from tests.support.servers import Server

Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@contextmanager
def session(server: Server, selector: str) -> Iterator[None]:
    assert server.post("/begin_weight_update", {"selector": selector}).status_code == 200
    yield
    assert server.post("/end_weight_update", {}).status_code == 200


def update(server: Server, tensors: Tensors, selector: str, **options: str | None) -> httpx.Response:
    torch.multiprocessing.set_sharing_strategy("file_system")  # tensors travel in shared memory, by name
    serialized = MultiprocessingSerializer.serialize([*tensors.items()], output_str=True)
    with session(server, selector):
        body = {"serialized_named_tensors": [serialized], "selector": selector, **options}
        return server.post("/update_weights_from_tensor", body)
