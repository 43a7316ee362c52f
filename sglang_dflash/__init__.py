"""DFLASH speculative decoding for stock SGLang.

Importing the package only defines its version. SGLang loads :mod:`sglang_dflash.plugin` through the entry point
``sglang.srt.plugins: dflash``.
"""

# The SGLang release, then our own counter (docs/compatibility.md#versions).
__version__ = "0.5.23.1"
