"""Torch implementations of the kernels that SGLang lacks on a CPU."""
