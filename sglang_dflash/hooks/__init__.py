"""SGLang hooks other than the worker."""
