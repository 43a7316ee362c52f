"""Exact mode: a verify whose bits are plain decoding's, in attention, in the gated delta net and in products."""
