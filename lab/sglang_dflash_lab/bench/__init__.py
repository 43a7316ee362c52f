"""Benchmarks against a running SGLang server, over HTTP only: neither SGLang nor the worker is imported here."""
