"""DFLASH speculative decoding for stock SGLang, which loads :mod:`sglang_dflash.plugin` as an entry point."""

# the SGLang release, then our own counter (docs/compatibility.md#versions)
__version__ = "0.5.23.1"
