"""Start-up."""
