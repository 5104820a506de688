"""What can go wrong with one ZooKeeper request, in the terms the rest of the code decides by.

The one question that matters after a lost connection is whether the request can have been carried out.
"""

from __future__ import annotations

from sparklog.errors import ClusterError


class ZkError(ClusterError):
    """A ZooKeeper request was refused or did not get through."""


class ZkUnreachable(ZkError):
    """No answer: ``sent`` false means it certainly did not happen; true means that its fate is unknown."""

    def __init__(self, detail: str, sent: bool = False) -> None:
        self.detail = detail
        self.sent = sent
        super().__init__(detail, sent)

    def __str__(self) -> str:
        return f"{self.detail} ({'fate unknown' if self.sent else 'not carried out'})"


class BrokerIdTaken(ClusterError):
    """A broker's id is registered by another process that lives, on another host."""


class ZkNoNode(ZkError):
    """The node does not exist."""


class ZkNodeExists(ZkError):
    """The node exists already."""


class ZkNotEmpty(ZkError):
    """The node has children, and is not deleted."""


class ZkNoAuth(ZkError):
    """The node is closed to this session: it does not know the cluster's secret."""

    def __str__(self) -> str:
        return (
            f"{super().__str__() or 'a node'} is closed: ZooKeeper lets only those write that know the cluster's secret"
        )


class ZkBadVersion(ZkError):
    """The node has another version than the request was bound to."""


class ZkMultiFailed(ZkError):
    """A multi was rolled back: operation ``index`` failed with ``cause``, nothing was done."""

    def __init__(self, index: int, cause: ZkError) -> None:
        self.index = index
        self.cause = cause
        super().__init__(index, cause)

    def __str__(self) -> str:
        return f"operation {self.index} of a multi: {type(self.cause).__name__} {self.cause}"
