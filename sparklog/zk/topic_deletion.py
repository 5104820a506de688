"""The deletion of a topic's nodes in ZooKeeper. Each write checks the controller epoch.

The topic's id is added to the list of deleted topics, so that absent brokers delete the topic's logs when they return.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from sparklog.model import TopicPartition
from sparklog.zk import codecs, paths
from sparklog.zk.controller_levels import ControllerLevels
from sparklog.zk.errors import ZkMultiFailed, ZkNoNode, ZkNotEmpty, raise_other_than
from sparklog.zk.ops import Check, Create, Delete, Op

#: The maximum number of ids in the list of deleted topics.
_DELETED_KEPT = 10_000
#: The depth of nodes below a topic to which its deletion descends; sparklog's own nodes have three levels.
_DEEPEST = 20


class TopicDeletion:
    """The part of ``ControllerStore`` that deletes topics."""

    def __init__(self, levels: ControllerLevels) -> None:
        self._levels = levels
        self._session = levels.session
        self._unreadable = levels.unreadable

    async def delete(self, name: str, topic_id: str, fence: Check) -> bool:
        """Delete a topic's nodes and its deletion request, and add its id to the list of deleted topics.

        The call may be repeated, even if a new topic with this name exists. ``fence`` is the operation that checks the
        controller epoch. Return False if another controller has been elected.

        Raises:
          ZkUnreachable: a part may have been deleted.
        """
        try:
            partitions = await self._session.children(paths.partitions(name))
        except ZkNoNode:
            partitions = ()
        same = Check(paths.topic_id(topic_id), -1)
        numbers = self._unreadable.numbers(paths.partitions(name), partitions)
        tps = [TopicPartition(name, number) for number in numbers]
        deletions = [
            self._session.multi([fence, same, Delete(paths.state(tp)), Delete(paths.partition(tp))]) for tp in tps
        ]
        for result in await asyncio.gather(*deletions, return_exceptions=True):
            if isinstance(result, ZkMultiFailed) and result.index == 0:
                return False
            if isinstance(result, BaseException) and not _is_missing(result) and not _has_other_children(result):
                raise result
        rest = [paths.partitions(name), paths.topic(name), paths.delete_topic(name)]
        await self._session.ensure(paths.DELETED_TOPICS)
        await self._drop_old_deletions()
        named = codecs.DeletedTopic(name, time.time_ns() // 1_000_000)
        deleted = Create(paths.deleted_topic(topic_id), codecs.encode(named))
        try:
            return await self._delete_all([fence, Delete(same.path), deleted], rest)
        except ZkMultiFailed as error:
            if not _has_other_children(error):
                raise
        await self._clear(paths.topic(name), [fence, same])
        return await self._delete_all([fence, Delete(same.path), deleted], rest)

    async def _drop_old_deletions(self) -> None:
        """Remove the older half of the list of deleted topics if it is too long.

        A broker that was absent since the deletion keeps the logs of these topics until an operator decides.
        """
        if len(await self._session.children(paths.DELETED_TOPICS)) < _DELETED_KEPT:
            return
        found = await self._levels.read_values(paths.DELETED_TOPICS, codecs.DeletedTopic)
        times = {name: deleted.deleted_ms for name, deleted in found.items()}
        oldest = sorted(times, key=times.__getitem__)[: len(times) // 2]
        gone = await asyncio.gather(
            *(self._session.delete(paths.deleted_topic(name)) for name in oldest), return_exceptions=True
        )
        raise_other_than(gone, ZkNoNode)

    async def _clear(self, path: str, bound: list[Op], *, depth: int = _DEEPEST) -> None:
        """Delete all remaining nodes below a topic's node, also those that sparklog did not create.

        If the checks in ``bound`` fail, nothing is deleted, and ``_delete_all`` detects that later.
        """
        names = await self._session.children(path) if depth else ()
        for child in (f"{path}/{name}" for name in names):
            with suppress(ZkNoNode):
                await self._clear(child, bound, depth=depth - 1)
            with suppress(ZkMultiFailed):
                await self._session.multi([*bound, Delete(child)])
                self._unreadable.skip(child, "it is in a deleted topic and is deleted with it")

    async def _delete_all(self, bound: list[Op], rest: list[str]) -> bool:
        """Delete the nodes ``rest`` in one multi with ``bound``. Nodes that no longer exist are skipped.

        If the topic id's node is gone, nothing is deleted: an earlier multi deleted it together with all the others,
        and the nodes that exist now belong to another topic. Returns False if the check of the epoch failed.
        """
        try:
            await self._session.multi([*bound, *(Delete(path) for path in rest)])
        except ZkMultiFailed as error:
            if error.index == 0:
                return False
            if not _is_missing(error):
                raise
            found = error.index - len(bound)
            return found < 0 or await self._delete_all(bound, rest[:found] + rest[found + 1 :])
        return True


def _is_missing(error: BaseException) -> bool:
    return isinstance(error, ZkMultiFailed) and isinstance(error.cause, ZkNoNode)


def _has_other_children(error: BaseException) -> bool:
    return isinstance(error, ZkMultiFailed) and isinstance(error.cause, ZkNotEmpty)
