"""Benchmarks, measurements, tiny trained pairs and their training, for sglang-dflash."""
