"""Every test: no network, the same seeds."""

from __future__ import annotations

import random
import socket
from typing import Any

import numpy as np
import pytest

_LOOPBACK = ("127.", "::1", "localhost")


class NetworkError(AssertionError):
    """A test reached for the network."""


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOOPBACK):
            raise NetworkError(f"a test tried to connect to {address!r}")
        connect(self, address)

    def guarded_lookup(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host is not None and not str(host).startswith(_LOOPBACK):
            raise NetworkError(f"a test tried to look up {host!r}")
        return lookup(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_lookup)
    # Subprocesses are out of the guard's reach; the Hugging Face hub at least is told.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def same_seeds() -> None:
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries draw from the global stream
    torch.manual_seed(0)
    # Tiny tensors: a second thread only waits.
    torch.set_num_threads(1)
