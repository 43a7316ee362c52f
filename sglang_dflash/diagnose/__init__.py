"""``sglang-dflash diagnose URL``: what drafting brings on a running server, and why it brings too little."""
