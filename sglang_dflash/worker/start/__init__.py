"""Start-up: drafter and pools, graphs and costs of every width, first calls of kernels, transfers between servers."""
