"""A forward pass in plain torch: attention, recurrent layers, norms, pools."""

ATTENTION_BACKEND = "torch_dflash"  # SGLang's name for our attention backend
