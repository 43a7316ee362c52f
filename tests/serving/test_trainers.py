"""What trainers call besides updates: the drafter from disk, checks of weights, resume, and stale drafters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_dflash.causes import STALE_DRAFTER
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.generation import counted, flush, generate_all
from tests.support.prompts import corpus
from tests.support.servers import Server, changed_drafter, worker_info
from tests.support.updates import tensors_of, update

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"


@pytest.fixture(autouse=True)
def version(dflash_hybrid: Server) -> Iterator[None]:
    yield
    assert dflash_hybrid.post("/update_weight_version", {"new_version": "default"}).status_code == 200


def ask(server: Server) -> list[tuple[list[int], int]]:
    flush(server)
    return counted(generate_all(server, corpus(PAIR, 3), 3, 48))


def load(server: Server, folder: Path, **options: object) -> tuple[int, str]:
    answer = server.post("/update_weights_from_disk", {"model_path": str(folder), **options})
    return answer.status_code, answer.text


def broken_drafters(folder: Path) -> Iterator[tuple[str, Path]]:
    """Folders that the launch or the server refuses, by what the answer names."""
    yield "block of 8", changed_drafter(PAIR, folder / "block", block_size=8)
    dflash = json.loads((drafter_path(PAIR) / "config.json").read_text())["dflash_config"]
    other_layers = {"dflash_config": {**dflash, "target_layer_ids": [0, 2, 4]}}
    yield "target_layer_ids", changed_drafter(PAIR, folder / "layers", **other_layers)
    yield "conv_taps", drafter_path(PAIR, "dflash2")
    lacking = Path(shutil.copytree(drafter_path(PAIR), folder / "lacking"))
    save_file({k: v for k, v in tensors_of(lacking).items() if k != "norm.weight"}, lacking / "model.safetensors")
    yield "missing: norm.weight", lacking
    masked = Path(shutil.copytree(drafter_path(PAIR), folder / "masked"))
    embedding = {"embedding": torch.zeros(128), "mask_token_id": dflash["mask_token_id"]}
    torch.save(embedding, masked / "mask_embedding.pt")
    yield "mask_embedding.pt", masked
    other = folder / "other"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    save_file({"encoder.layer.0.weight": torch.zeros(3)}, other / "model.safetensors")
    yield "encoder.layer.0.weight", other


def test_a_drafters_folder_updates_the_drafter_alone(dflash_hybrid: Server, tmp_path: Path) -> None:
    server, before = dflash_hybrid, ask(dflash_hybrid)
    for named, folder in broken_drafters(tmp_path):
        status, text = load(server, folder)
        assert status == 400 and named in text, (named, text)
        assert ask(server) == before, named
    status, text = load(server, drafter_path(PAIR, "noisy"))
    assert status == 200, text
    worse = ask(server)
    assert [tokens for tokens, _ in worse] == [tokens for tokens, _ in before]
    assert sum(steps for _, steps in worse) > sum(steps for _, steps in before)
    model = server.get("/model_info").json()
    assert model["model_path"] == str(target_path(PAIR)), model
    assert load(server, drafter_path(PAIR))[0] == 200
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

    def by_name(name: str) -> object:
        return dflash_hybrid.post("/get_weights_by_name", {"name": name, "truncate_size": 3}).json()

    assert by_name("draft.norm.weight") == drafter["norm.weight"][:3].float().tolist()
    assert by_name("draft.fc.weight") == drafter["fc.weight"][:3].float().tolist()
    assert "error" in str(by_name("draft.no.weight"))


def test_a_resume_without_a_release_is_refused(dflash_hybrid: Server) -> None:
    server, before = dflash_hybrid, ask(dflash_hybrid)
    answer = server.post("/resume_memory_occupation", {"tags": ["weights"]})
    assert answer.status_code == 400 and "cannot resume weights" in answer.text
    assert server.post("/release_memory_occupation", {"tags": ["weights", "kv_cache"]}).status_code == 200
    assert server.post("/resume_memory_occupation", {"tags": ["weights"]}).status_code == 200
    assert server.post("/resume_memory_occupation", {}).status_code == 400
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}).status_code == 200
    assert ask(server) == before


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
    assert worker_info(server)["drafting"]["accept_length"] is None  # judged anew
    assert update(server, drafter, "draft", weight_version="step-2").status_code == 200
    assert update(server, target, "target", weight_version="step-2").status_code == 200
    versions, known = state()
    assert versions == {"target": "step-2", "draft": "step-2"} and STALE_DRAFTER not in known
