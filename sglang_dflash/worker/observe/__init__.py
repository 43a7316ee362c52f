"""Telemetry of the worker: step counters and times, Prometheus series, and the judgement whether drafting pays."""
