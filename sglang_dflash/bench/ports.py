"""A port for a server that will bind it many seconds from now."""

from __future__ import annotations

import random
import socket

# Below the range that the kernel hands to outgoing connections (32768 and up on Linux): a port of that range can be
# free when asked and taken when an SGLang server, 20 s later, binds it. SGLang itself picks from 22000 to 29999.
_PORTS = range(10000, 22000)
_choice = random.SystemRandom()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on, outside the ephemeral range."""
    while True:
        port = _choice.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
