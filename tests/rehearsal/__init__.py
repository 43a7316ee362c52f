"""The GPU path, rehearsed on a CPU.

A real engine on CPU tensors, with SGLang's own Triton kernels and pools and our own kernels under Triton's interpreter,
and SGLang's own graph runners over emulated CUDA graphs. ``docs/development.md#rehearsal`` says what that shows and
what it hides.

The two functions here are entry points (``tests/rehearsal/plugin``): whoever puts that folder on PYTHONPATH rehearses.
"""

from __future__ import annotations


def activate() -> str:
    """Entry point of SGLang's platform discovery, which is still importing SGLang."""
    return f"{__name__}.platform.RehearsalPlatform"


def register() -> None:
    """Entry point of SGLang's plugins."""
    from tests.rehearsal.install import install

    install()
