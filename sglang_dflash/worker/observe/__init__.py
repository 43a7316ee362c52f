"""Telemetry: counters, step times, metrics and the memory a rank allocated. Nothing here decides anything."""
