"""Ports for servers that are started later."""

from __future__ import annotations

import random
import socket

PORTS = range(15000, 32000)  # below Linux' ephemeral ports (32768-60999, net.ipv4.ip_local_port_range)
TRIES = 200


def free_port() -> int:
    """A TCP port on which nothing listens now.

    Not one that the system chooses: those are ephemeral ports, and between the choice and the start of the server (half
    a minute for a model server) any client's outgoing connection may be given it.

    Raises:
        OSError: ``TRIES`` ports were all in use.
    """
    for port in random.SystemRandom().sample(PORTS, TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among {TRIES} of {PORTS.start} to {PORTS.stop - 1}; end some servers")
