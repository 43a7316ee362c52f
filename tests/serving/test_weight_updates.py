"""A weight update that does not fit is refused by name before a tensor is written, and the server serves on."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.utils.common import init_custom_process_group

from sglang_dflash_lab.bench.server import free_port
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.generation import assert_nothing_leaked, counted, flush, generate, generate_all
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import Server
from tests.support.updates import Tensors, session, tensors_of, update

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"


def one_shape_wrong(tensors: Tensors) -> Tensors:
    """All tensors times two, of which the last has a row too many."""
    *others, (name, last) = ((name, 2 * tensor) for name, tensor in tensors.items())
    return {**dict(others), name: torch.cat((last, last[:1]))}


def one_name_wrong(tensors: Tensors) -> Tensors:
    return {name.replace("0.mlp.up_proj", "0.mlp.up_porj"): 2 * tensor for name, tensor in tensors.items()}


class Group:
    """A process group of this process, rank 0, and a server, as a trainer has it; gloo, because NCCL needs a GPU."""

    def __init__(self, server: Server) -> None:
        self.server, self.port = server, free_port()
        address = {"master_address": "127.0.0.1", "master_port": self.port, "rank_offset": 1, "world_size": 2}
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(server.post, "/init_weights_update_group", {**address, "backend": "gloo"})
            self.group = init_custom_process_group(
                backend="gloo",
                init_method=f"tcp://127.0.0.1:{self.port}",
                world_size=2,
                rank=0,
                group_name="weight_update_group",
            )
            assert joining.result().status_code == 200

    def update(self, tensors: Tensors, selector: str) -> httpx.Response:
        described = {"names": [*tensors], "dtypes": [str(each.dtype)[6:] for each in tensors.values()]}
        shapes = [list(each.shape) for each in tensors.values()]
        with session(self.server, selector), ThreadPoolExecutor(1) as pool:
            body = {**described, "shapes": shapes, "selector": selector}
            answer = pool.submit(self.server.post, "/update_weights_from_distributed", body)
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor, src=0, group=self.group)
            return answer.result()

    def leave(self) -> None:
        assert self.server.post("/destroy_weights_update_group", {}).status_code == 200
        torch.distributed.destroy_process_group(self.group)


def update_from_disk(server: Server, tensors: Tensors, folder: Path) -> httpx.Response:
    shutil.copytree(target_path(PAIR), folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, folder / "model.safetensors")
    return server.post("/update_weights_from_disk", {"model_path": str(folder)})


def ask(server: Server) -> list[tuple[list[int], int]]:
    flush(server)
    return counted(generate_all(server, corpus(PAIR, 3), 3, 48))


def test_tensors_that_do_not_fit_are_refused_whole(dflash_hybrid: Server, tmp_path: Path) -> None:
    server, before = dflash_hybrid, ask(dflash_hybrid)
    target, drafter = tensors_of(target_path(PAIR)), tensors_of(drafter_path(PAIR, "good"))
    refusals = {
        "unexpected": update(server, target, "draft"),
        list(drafter)[-1]: update(server, one_shape_wrong(drafter), "draft"),
        list(target)[-1]: update(server, one_shape_wrong(target), "target"),
        list(target)[0]: update(server, {list(target)[0]: torch.zeros(3, 5)}, "target", load_format="direct"),
        "from disk": update_from_disk(server, one_shape_wrong(target), tmp_path / "target"),
        "fc.weight": update(server, drafter, "target"),
        "model.layers.0.mlp.up_porj.weight": update(server, one_name_wrong(target), "target"),
        "torch.int8": update(server, {name: tensor.to(torch.int8) for name, tensor in target.items()}, "target"),
    }
    group = Group(server)
    refusals["unexpected: lm_head"] = group.update({"lm_head.bias": torch.zeros(3), **drafter}, "draft")
    refusals["at model.norm.weight [129]"] = group.update(one_shape_wrong(target), "target")
    group.leave()
    for named, answer in refusals.items():
        assert answer.status_code == 400, (named, answer.text)
        assert "nothing was written" in answer.text, (named, answer.text)
        assert named in answer.text or named == "from disk", (named, answer.text)
        assert ask(server) == before, named
    assert server.get("/model_info").json()["model_path"] == str(target_path(PAIR))
    # What fits is still written: accept counts change with the drafter, and return with it.
    assert json.loads(update(server, {"norm.weight": -drafter["norm.weight"]}, "draft").text)["success"]
    worse = ask(server)
    assert [tokens for tokens, _ in worse] == [tokens for tokens, _ in before] and worse != before
    assert update(server, {"norm.weight": drafter["norm.weight"]}, "draft").status_code == 200
    assert ask(server) == before


PAUSES = ["retract", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("in_place", "abort"))]


@pytest.mark.parametrize("mode", PAUSES)
def test_a_pause_with_an_update_changes_no_answer(dflash_hybrid: Server, mode: str) -> None:
    """As a trainer does, twice: pause while eight requests run, load the same weights, continue."""
    server, length, asked = dflash_hybrid, 120, {"sampling_params": {"ignore_eos": True}}
    prompts = [*corpus(PAIR, 4), *random_prompts(PAIR, 4)]  # those without order take about a step per token
    flush(server)
    undisturbed = generate_all(server, prompts, len(prompts), length, **asked)
    flush(server)
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(generate, server, prompt, length, **asked) for prompt in prompts]
        for _ in range(1 if mode == "abort" else 2):
            time.sleep(0.3)
            assert server.post("/pause_generation", {"mode": mode}).status_code == 200
            assert mode == "abort" or not all(each.done() for each in running), "nothing ran"
            body = {"model_path": str(target_path(PAIR)), "flush_cache": mode == "retract"}
            assert server.post("/update_weights_from_disk", body).json()["success"]
            assert server.post("/continue_generation", {}).status_code == 200
        found = [each.result() for each in running]
    for answer, whole in zip(found, undisturbed, strict=True):
        assert answer.tokens == (whole.tokens[: len(answer.tokens)] if mode == "abort" else whole.tokens)
    if mode == "abort":
        assert any(answer.meta["finish_reason"]["type"] == "abort" for answer in found)
    if mode == "in_place":
        assert counted(found) == counted(undisturbed)
    assert_nothing_leaked(server)
