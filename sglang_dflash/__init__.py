"""DFLASH speculative decoding for stock SGLang.

Importing the package does nothing but name its version: SGLang finds the rest through two entry points,
``sglang.srt.plugins: dflash`` (:mod:`sglang_dflash.plugin`) and ``sglang.srt.platforms: dflash_cpu``
(:mod:`sglang_dflash.cpu`).
"""

# The SGLang release that it is for, then our own count (docs/compatibility.md#versions).
__version__ = "0.5.23.1"
