"""Ports for servers: free, and not the kernel's to give away before the server binds them."""

from __future__ import annotations

import socket

import pytest

from sglang_dflash.bench import ports


def test_ports_are_outside_the_ephemeral_range() -> None:
    linux_default = 32768  # a machine may be set otherwise; the test must not depend on that
    assert max(ports._PORTS) < linux_default
    assert all(ports.free_port() in ports._PORTS for _ in range(100))


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_port()
    monkeypatch.setattr(ports, "_PORTS", range(first, first + 2))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert {ports.free_port() for _ in range(20)} == {first + 1}
