"""What the step serves beyond drafting and verifying: a file per promise, with its hooks into SGLang."""
