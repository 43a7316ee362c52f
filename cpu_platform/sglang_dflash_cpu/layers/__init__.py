"""The parts of a forward pass in plain torch: attention, recurrent layers, norms, and their pools."""

ATTENTION_BACKEND = "torch_dflash"  # SGLang's name for our attention backend
