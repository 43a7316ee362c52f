"""DFLASH speculative decoding for stock SGLang.

Importing the package only defines its version. SGLang finds the rest through the entry point
``sglang.srt.plugins: dflash`` (:mod:`sglang_dflash.plugin`).
"""

# The SGLang release that it is for, then our own count (docs/compatibility.md#versions).
__version__ = "0.5.23.1"
