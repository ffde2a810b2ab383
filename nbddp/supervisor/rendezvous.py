"""The rendezvous of one node with itself, on a store that only this machine can reach. Runs in the supervisor.

torch's own handlers listen on every interface, without authentication.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined] # re-exported where torch was built with distributed
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

HOST = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """A group of one agent, whose store the ranks use too."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "nbddp"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((HOST, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        # The store takes the descriptor over and closes it.
        self._store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach())
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(HOST, port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True
