"""Fixtures of the engine tests: models on disk, once a session."""

from __future__ import annotations

import pytest
import torch

from tests.engine.checkpoints import Checkpoints

# The reference shares the machine with the server under test: spinning OpenMP workers would starve it.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
