"""How the shipped pairs were trained: `sglang-dflash pairs train`."""
