"""Peers without their packages, and runs in this process, as for the tests of peers."""

from tests.train.peers.conftest import in_process, runners

__all__ = ["in_process", "runners"]
