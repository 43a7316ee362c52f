"""Where the cases of kernels run: on ``OPS_DEVICE``, or under Triton's interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import os

DEVICE = os.environ.get("OPS_DEVICE", "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.rehearsal import interpreter

    interpreter.install()
