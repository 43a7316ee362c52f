"""Updates of weights, and what trainers call besides; what does not fit is an error that the server survives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.common import init_custom_process_group

from sglang_dflash.causes import STALE_DRAFTER
from sglang_dflash_lab.bench.server import free_port
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.configs import write_model
from tests.support.generation import counted, flush, generate, generate_all
from tests.support.prompts import corpus
from tests.support.servers import Server, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


@contextmanager
def session(server: Server, selector: str) -> Iterator[None]:
    assert server.post("/begin_weight_update", {"selector": selector}).status_code == 200
    yield
    assert server.post("/end_weight_update", {}).status_code == 200


def serialized(tensors: Tensors) -> list[str]:
    torch.multiprocessing.set_sharing_strategy("file_system")  # tensors travel in shared memory, by name
    return [MultiprocessingSerializer.serialize([*tensors.items()], output_str=True)]


def update(server: Server, tensors: Tensors, selector: str, **options: object) -> httpx.Response:
    with session(server, selector):
        body = {"serialized_named_tensors": serialized(tensors), "selector": selector, **options}
        return server.post("/update_weights_from_tensor", body)


def one_shape_wrong(tensors: Tensors) -> Tensors:
    """All tensors times two, of which the last has a row too many."""
    *others, (name, last) = ((name, 2 * tensor) for name, tensor in tensors.items())
    return {**dict(others), name: torch.cat((last, last[:1]))}


class Group:
    """A process group of this process, rank 0, and a server, as a trainer has it; gloo, because NCCL needs a GPU."""

    def __init__(self, server: Server) -> None:
        self.server, port = server, free_port()
        address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(server.post, "/init_weights_update_group", {**address, "backend": "gloo"})
            where, name = f"tcp://127.0.0.1:{port}", "weight_update_group"
            self.group = init_custom_process_group("gloo", where, world_size=2, rank=0, group_name=name)
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


def load(server: Server, folder: Path) -> httpx.Response:
    return server.post("/update_weights_from_disk", {"model_path": str(folder)})


def ask(server: Server) -> list[tuple[list[int], int]]:
    flush(server)
    return counted(generate_all(server, corpus(PAIR, 3), 3, 48))


def test_tensors_that_do_not_fit_are_an_error_and_the_server_goes_on(dflash_hybrid: Server, tmp_path: Path) -> None:
    """Those before the error are written, as SGLang's loaders do."""
    server, before = dflash_hybrid, ask(dflash_hybrid)
    target, drafter = tensors_of(target_path(PAIR)), tensors_of(drafter_path(PAIR))
    misfit = write_model(tmp_path, json.loads((target_path(PAIR) / "config.json").read_text()), one_shape_wrong(target))

    def restored() -> bool:
        assert update(server, target, "target").status_code == update(server, drafter, "draft").status_code == 200
        return ask(server) == before

    def refused(answer: httpx.Response, named: str) -> None:
        assert answer.status_code == 400 and named in answer.text, (named, answer.text)

    refused(update(server, one_shape_wrong(target), "target"), "Error: ")
    assert ask(server) != before and restored()
    refused(load(server, misfit), "Error: ")
    assert ask(server) != before and restored()
    for _ in range(2):
        refused(load(server, drafter_path(PAIR, "noisy")), "selector draft")
        assert ask(server) == before
    refused(update(server, {list(target)[0]: torch.zeros(3, 5)}, "target", load_format="direct"), "Error: ")
    refused(update(server, target, "draft"), "unexpected")
    refused(update(server, one_shape_wrong(drafter), "draft"), list(drafter)[-1])
    group = Group(server)
    refused(group.update({"lm_head.bias": torch.zeros(3), **drafter}, "draft"), "unexpected: lm_head")
    refused(group.update(one_shape_wrong(target), "target"), "Failed to update")
    group.leave()
    assert restored() and server.get("/model_info").json()["model_path"] == str(target_path(PAIR))
    # What fits is written: accept counts change with the drafter, and return with it.
    assert json.loads(update(server, {"norm.weight": -drafter["norm.weight"]}, "draft").text)["success"]
    worse = ask(server)
    assert [tokens for tokens, _ in worse] == [tokens for tokens, _ in before] and worse != before
    assert restored()


@pytest.mark.usefixtures("version")
def test_versions_of_an_update_in_the_middle_of_answers_are_exact(dflash_hybrid: Server) -> None:
    """The new weights answer token 0 only. A step that was launched before the update has the old ones."""
    server, prompts, norm = dflash_hybrid, corpus(PAIR, 6), "model.norm.weight"
    before, target = ask(server), tensors_of(target_path(PAIR))
    with ThreadPoolExecutor(len(prompts)) as pool:
        whole = {"sampling_params": {"ignore_eos": True}}
        running = [pool.submit(generate, server, prompt, 400, **whole) for prompt in prompts]
        time.sleep(0.3)
        assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
        changed = {norm: torch.full_like(target[norm], -1.0)}  # a weight of 1 + w
        updated = update(server, changed, "target", weight_version="new", flush_cache=False)
        assert updated.status_code == 200, updated.text
        assert server.post("/continue_generation", {}).status_code == 200
        answers = [each.result() for each in running]
    for answer in answers:
        old = [*answer.tokens, 0].index(0)
        assert 0 < old < 400 and set(answer.tokens[old:]) == {0}
        spans = [("default", 0, old), ("new", old, 400)]
        assert [(each["version"], each["start"], each["end"]) for each in answer.meta["weight_versions"]] == spans
    assert update(server, target, "target", weight_version="default").status_code == 200
    assert ask(server) == before


def test_checks_of_weights_cover_the_drafter(dflash_hybrid: Server) -> None:
    def checksums(selector: str) -> dict[str, str]:
        answer = dflash_hybrid.post("/weights_checker", {"action": "checksum", "selector": selector}).json()
        found: dict[str, str] = answer["ranks"][0]["checksums"]
        return found

    drafter = tensors_of(drafter_path(PAIR))
    before, of_target = checksums("draft"), checksums("target")
    assert {"draft.fc.weight", "draft.norm.weight"} <= before.keys()
    assert checksums("all") == of_target  # as updates of all
    assert update(dflash_hybrid, {"fc.weight": 2 * drafter["fc.weight"]}, "draft").status_code == 200
    assert {name for name, found in checksums("draft").items() if found != before[name]} == {"draft.fc.weight"}
    assert update(dflash_hybrid, drafter, "draft").status_code == 200
    assert checksums("draft") == before
    # A reset leaves nothing that an update does not write; SGLang's comparison with a snapshot needs CUDA.
    texts, reset = ask(dflash_hybrid), {"action": "reset_tensors", "selector": "draft"}
    assert dflash_hybrid.post("/weights_checker", reset).status_code == 200
    assert checksums("draft") != before and checksums("target") == of_target
    assert [tokens for tokens, _ in ask(dflash_hybrid)] == [tokens for tokens, _ in texts]
    assert update(dflash_hybrid, drafter, "draft").status_code == 200
    assert checksums("draft") == before and ask(dflash_hybrid) == texts


def test_a_resume_without_a_release_is_refused(dflash_hybrid: Server) -> None:
    server, before = dflash_hybrid, ask(dflash_hybrid)
    answer = server.post("/resume_memory_occupation", {"tags": ["weights"]})
    assert answer.status_code == 400 and "cannot resume weights" in answer.text
    assert server.post("/release_memory_occupation", {"tags": ["weights", "kv_cache"]}).status_code == 200
    assert server.post("/resume_memory_occupation", {"tags": ["weights"]}).status_code == 200
    assert server.post("/resume_memory_occupation", {}).status_code == 400
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).status_code == 200
    assert ask(server) == before


@pytest.fixture
def version(dflash_hybrid: Server) -> Iterator[None]:
    yield
    assert dflash_hybrid.post("/update_weight_version", {"new_version": "default"}).status_code == 200


@pytest.mark.usefixtures("version")
def test_a_drafter_older_than_its_target_is_named(dflash_hybrid: Server) -> None:
    server, target, drafter = dflash_hybrid, tensors_of(target_path(PAIR)), tensors_of(drafter_path(PAIR))

    def state() -> tuple[dict[str, object], dict[str, str]]:
        info = worker_info(server)
        return info["weight_versions"], info["drafting"]["known"]

    assert update(server, drafter, "draft").status_code == 200
    ask(server)
    versions, known = state()
    assert versions == {"target": "default", "draft": "default"} and STALE_DRAFTER not in known

    def warnings() -> list[str]:
        return [line for line in server.log.splitlines() if STALE_DRAFTER in line]

    earlier = warnings()
    for _ in range(2):
        assert update(server, target, "all", weight_version="step-1").status_code == 200
    versions, known = state()
    assert versions == {"target": "step-1", "draft": "default"}
    assert known[STALE_DRAFTER] == "weight_version step-1 of the target, default of the drafter"
    (warning,) = warnings()[len(earlier) :]
    assert "weight_version step-1 of the target" in warning
    assert worker_info(server)["drafting"]["accept_length"] is None  # its counts start again
    assert update(server, drafter, "draft", weight_version="step-2").status_code == 200
    assert update(server, target, "target", weight_version="step-2").status_code == 200
    versions, known = state()
    assert versions == {"target": "step-2", "draft": "step-2"} and STALE_DRAFTER not in known
