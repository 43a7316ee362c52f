"""SGLang's own server tests, the kits of its wheel (``sglang.test.kits``), against our server and plain decoding.

``python -m tests.kits [ROW ...]`` runs them, and exits with 1 if a test fails under DFLASH alone.
"""
