"""Telemetry of the worker: step counters, Prometheus series, and the judgement whether drafting pays."""
