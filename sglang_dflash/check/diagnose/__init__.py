"""``sglang-dflash diagnose URL``."""
