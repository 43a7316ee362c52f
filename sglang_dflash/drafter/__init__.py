"""A published drafter: configuration, files and tensors."""
