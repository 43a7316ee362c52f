"""``make contract SGLANG=X.Y.Z``: what another SGLang release changed of what this package uses, by name.

The release is installed beside the environment's own, never into it. Both are looked at in processes of their own, and
what differs is printed: names that are gone, parameters, attributes, code, the user's view, the patches.
"""
