"""Task accuracy beside speed: exact answers, and generated programs run in a sandboxed subprocess."""
