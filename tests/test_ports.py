"""Free ports are ones that stay free until a server has started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline import ports
from pipeline.ports import PORTS, free_port


def test_no_outgoing_connection_is_given_a_chosen_port() -> None:
    setting = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not setting.exists():
        pytest.skip("no Linux")
    first, last = map(int, setting.read_text().split())
    if (first, last) != (32768, 60999):
        pytest.skip("not Linux' default range of ephemeral ports")
    assert PORTS.stop <= first
    assert len({free_port() for _ in range(20)}) > 1


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "TRIES", 2)
    with socket.socket() as listening, socket.socket() as neighbour:
        while True:  # two in a row
            taken = free_port()
            try:
                neighbour.bind(("127.0.0.1", taken + 1))
                break
            except OSError:
                continue
        neighbour.close()
        listening.bind(("127.0.0.1", taken))
        monkeypatch.setattr(ports, "PORTS", range(taken, taken + 2))
        assert {free_port() for _ in range(10)} <= {taken + 1}
        monkeypatch.setattr(ports, "PORTS", range(taken, taken + 1))
        monkeypatch.setattr(ports, "TRIES", 1)
        with pytest.raises(OSError, match="no free port among 1 of"):
            free_port()
