"""The page table of a request has a column for each token that a verify at the end of the context reads."""

import importlib
import sys
from contextlib import suppress
from unittest.mock import MagicMock

for name in ("flashinfer", "flashinfer.decode", "sgl_kernel", "sgl_kernel.flash_attn"):
    sys.modules[name] = MagicMock(__spec__=MagicMock())

CONTEXT, BLOCK, PAGE = 96, 16, 1
for module, backend in {
    "flashattention_backend": "FlashAttentionBackend",
    "trtllm_mha_backend": "TRTLLMHAAttnBackend",
}.items():
    found = importlib.import_module(f"sglang.srt.layers.attention.{module}")
    found.get_spec = lambda: MagicMock(speculative_num_draft_tokens=BLOCK)
    made = object.__new__(getattr(found, backend))
    runner = MagicMock(page_size=PAGE)
    runner.model_config.context_len, runner.model_config.is_encoder_decoder = CONTEXT, False
    # A later line needs a GPU.
    with suppress(Exception):
        made.__init__(runner)
    assert hasattr(made, "max_num_pages"), f"{backend}: not reached"
    assert made.max_num_pages * PAGE >= CONTEXT - 1 + BLOCK, f"{backend}: {made.max_num_pages} pages"
