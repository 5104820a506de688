"""The errors of ZooKeeper requests, classified by what callers need to decide.

After a lost connection a caller must know whether the request may have been performed.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparklog.errors import ClusterError


class ZkError(ClusterError):
    """The base class of the errors of ZooKeeper requests."""


class ZkUnreachable(ZkError):
    """The error of a request to which ZooKeeper has not responded.

    If ``sent`` is false, the request was certainly not performed. Otherwise its outcome is unknown.
    """

    def __init__(self, detail: str, sent: bool = False) -> None:
        self.detail = detail
        self.sent = sent
        super().__init__(detail, sent)

    def __str__(self) -> str:
        return f"{self.detail} ({'outcome unknown' if self.sent else 'not performed'})"


class BrokerIdTaken(ClusterError):
    """The error for a broker id that another live process has registered, on this host or another."""


class ZkNoNode(ZkError):
    """The error for a node that does not exist."""


class ZkNodeExists(ZkError):
    """The error for a node that exists already."""


class ZkNotEmpty(ZkError):
    """The error for a node that cannot be deleted because it has children."""


class ZkNoAuth(ZkError):
    """The error for a node that this session may not change or read, because it lacks the credentials."""

    def __str__(self) -> str:
        return (
            f"{super().__str__() or 'a node'} is closed: ZooKeeper lets only sessions use it"
            " that know the cluster's secret or have its creator's credentials"
        )


class ZkBadVersion(ZkError):
    """The error for a node that does not have the version that the request expects."""


class ZkMultiFailed(ZkError):
    """The error of a multi (ZooKeeper transaction) that failed as a whole, so that nothing was written.

    Its operation number ``index`` failed with ``cause``.
    """

    def __init__(self, index: int, cause: ZkError) -> None:
        self.index = index
        self.cause = cause
        super().__init__(index, cause)

    def __str__(self) -> str:
        return f"operation {self.index} of a multi: {type(self.cause).__name__} {self.cause}"


def raise_other_than(results: Sequence[object], allowed: type[ClusterError]) -> None:
    """Raise the first exception in ``results`` that is not of the type ``allowed``.

    ``results`` are the results of ``asyncio.gather`` with ``return_exceptions``.
    """
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, allowed):
            raise result
