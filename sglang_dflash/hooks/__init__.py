"""What SGLang calls of ours that is not the worker: one file per hook."""
