"""Conversion, prompts and demo of SmolLM2-135M-Instruct, a published model from the Python package index."""
