"""The memory that a pair takes, from configurations and headers alone."""
