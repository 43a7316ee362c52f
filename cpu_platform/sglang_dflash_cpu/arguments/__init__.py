"""Server arguments on the CPU platform: refused, mapped or given defaults."""
