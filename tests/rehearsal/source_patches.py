"""Lines of SGLang that refuse what only a rehearsal asks for, and what stands there instead.

A contract test (``tests/rehearsal/test_source_patches.py``) holds that each line is still there.
"""

from __future__ import annotations

import inspect
import pkgutil
import textwrap
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SourcePatch:
    """One change of a function's text.

    Attributes:
        function: dotted path of the function.
        old: text in it, once.
        new: what replaces it.
        reason: why, in one line.
    """

    function: str
    old: str
    new: str
    reason: str

    def source(self) -> str:
        """The function's text without its decorators, as it is."""
        function = inspect.unwrap(pkgutil.resolve_name(self.function))
        text = textwrap.dedent(inspect.getsource(function))
        return text[text.index("def ") :]

    def apply(self) -> None:
        """Replace the function in its module and wherever it was imported to."""
        from sglang.srt.plugins.hook_registry import _propagate_patch

        path, _, name = self.function.rpartition(".")
        module: Any = pkgutil.resolve_name(path)
        original, source = getattr(module, name), self.source()
        assert source.count(self.old) == 1, f"{self.function} has changed: {self.old!r} is not in it once"
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(code, module.__file__, "exec"), module.__dict__)
        _propagate_patch(original, getattr(module, name), module)


PATCHES = (
    SourcePatch(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph",
        'if model_runner.device == "cpu" and not get_flags().capture.enable_torch_compile:',
        "if False:",
        'to SGLang the device "cpu" has no CUDA graphs',
    ),
    SourcePatch(
        "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule",
        "assert q.dtype != torch.float32, (",
        "assert True, (",
        "the prefill kernel refuses float32; in it alone can tokens be compared one by one",
    ),
)


def install() -> None:
    for patch in PATCHES:
        patch.apply()
