"""The offset commits of a group member. The commits are sent one request at a time, in the order of the calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from sparklog.client.cluster.loop_coordinator import Attempts, LoopCoordinator
from sparklog.client.cluster.request_pieces import pieces
from sparklog.client.errors import ClientTimeout, CommitRefused
from sparklog.errors import BrokerError, ErrorCode
from sparklog.model import TopicPartition
from sparklog.protocol.messages import CommitOffsets, CommitOffsetsReply, GroupOffset

#: Errors which show that the member was removed from the group. The member then joins again.
REMOVED = frozenset({ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH})
#: Errors after which a commit is refused permanently.
FENCED = frozenset({*REMOVED, ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.FENCED_INSTANCE_ID})
REMOVED_SINCE = "this consumer was removed from the group, and others may have read its partitions since"


class AssignedPartition(NamedTuple):
    """A partition that the coordinator has assigned to the member, with the id of its topic."""

    topic: str
    topic_id: str
    partition: int

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class Commit(NamedTuple):
    """A queued commit, with the epoch of the member at the time of the call.

    The commit must be sent with this epoch. With a newer epoch, a late commit might be accepted although its partitions
    were revoked and assigned again in the meantime. ``incarnation`` is the number of times that the member had left the
    group, or had been removed from it, before the call.
    """

    incarnation: int
    epoch: int
    offsets: Mapping[AssignedPartition, int]
    done: Future[None]


class GroupCommits:
    """A queue of the commits of one group member, which sends them in order. A part of ``GroupSession``.

    Not thread-safe: use it only on the session's thread. Only ``put`` may be called in any thread.
    """

    def __init__(
        self,
        coordinator: LoopCoordinator,
        group: str,
        *,
        timeout_s: float,
        member: Callable[[], tuple[int, str]],
    ) -> None:
        """Create an empty queue. ``member`` returns the current ``incarnation`` (see ``Commit``) and member id."""
        self._coordinator = coordinator
        self._group = group
        self._timeout_s = timeout_s
        self._member = member
        self._waiting: deque[Commit] = deque()
        self._woken = asyncio.Event()
        self._ending = False

    def put(self, commit: Commit) -> None:
        """Add a commit to the queue.

        Any thread may call this method. After it, ``wake`` must be called on the session's thread.
        """
        self._waiting.append(commit)

    def wake(self) -> None:
        """Send the queued commits soon."""
        self._woken.set()

    def end(self) -> None:
        """Make ``send_all`` return as soon as the queue is empty."""
        self._ending = True
        self._woken.set()

    def refuse_rest(self, error: Exception) -> None:
        """Fail the commits that are still in the queue, without sending them."""
        for left in self._waiting:
            if left.done.set_running_or_notify_cancel():
                left.done.set_exception(error)

    async def send_all(self) -> None:
        """Send the commits, one request at a time, so that an older commit never takes effect after a newer commit.

        Commits that arrive while a request is in flight are sent together in the next request.
        """
        while True:
            while self._waiting:
                first = self._waiting.popleft()
                together = [first]
                while self._waiting and self._waiting[0][:2] == first[:2]:
                    together.append(self._waiting.popleft())
                wanted = [one for one in together if one.done.set_running_or_notify_cancel()]
                if wanted:
                    await self._send(wanted)
            if self._ending:
                return
            self._woken.clear()
            if not self._waiting and not self._ending:
                await self._woken.wait()

    async def _send(self, commits: Collection[Commit]) -> None:
        error: Exception | None = None
        try:
            await self._ask(commits)
        except Exception as failed:
            error = failed
        except asyncio.CancelledError:
            error = ClientTimeout("the consumer was closed before the response to the commit")
            raise
        finally:
            for commit in commits:
                if error is None:
                    commit.done.set_result(None)
                else:
                    commit.done.set_exception(error)

    async def _ask(self, commits: Iterable[Commit]) -> None:
        incarnation, member_id = self._member()
        offsets: dict[AssignedPartition, int] = {}
        epoch = -1
        for commit in commits:
            epoch = commit.epoch
            if commit.incarnation != incarnation:
                raise CommitRefused(ErrorCode.UNKNOWN_MEMBER_ID, REMOVED_SINCE)
            offsets.update(commit.offsets)
        named = tuple(GroupOffset(one.topic, one.partition, offset, one.topic_id) for one, offset in offsets.items())
        attempts = Attempts(self._coordinator, timeout_s=self._timeout_s)
        for piece in pieces(named):
            request = CommitOffsets(0, self._group, tuple(piece), None, member_id, epoch)
            try:
                reply = await attempts.ask(request, CommitOffsetsReply)
            except BrokerError as error:
                raise CommitRefused(error.code, error.detail) if error.code in FENCED else error from None
            for result in reply.results:
                if result.code and result.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise BrokerError(result.code, result.detail)
