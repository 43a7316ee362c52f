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
    chosen = getattr(found, backend)
    chosen.__base__.__init__ = lambda *arguments, **options: None
    made = MagicMock()
    made.__class__ = chosen
    runner = MagicMock(page_size=PAGE, device="cpu")
    runner.model_config.context_len, runner.model_config.is_encoder_decoder = CONTEXT, False
    # A later line needs a GPU.
    with suppress(Exception):
        chosen.__init__(made, runner)
    assert isinstance(made.max_num_pages, int), f"{backend}: not reached"
    assert made.max_num_pages * PAGE >= CONTEXT - 1 + BLOCK, f"{backend}: {made.max_num_pages} pages"
