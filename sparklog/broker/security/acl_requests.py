"""CreateAcls, DescribeAcls and DeleteAcls requests.

The broker writes a change to ZooKeeper, from which all brokers read it. It replies when it uses the change itself.
Other brokers use the change shortly after.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sparklog.broker.context import BrokerContext
from sparklog.broker.requests.delayed_replies import reply_later
from sparklog.broker.security.acl_cache import AclCache
from sparklog.broker.security.authorizer import Authorizer
from sparklog.errors import BrokerError, ConfigError, ErrorCode
from sparklog.net.server_connection import ServerConnection
from sparklog.protocol.messages import (
    Ack,
    AclCondition,
    CreateAcls,
    DeleteAcls,
    DeleteAclsReply,
    DescribeAcls,
    DescribeAclsReply,
    Reply,
)
from sparklog.security.acl_entries import binding_of, condition_of, entry_of
from sparklog.security.acls import AclBinding, AclFilter

_log = logging.getLogger(__name__)

#: The most ACLs of a cluster. Every broker has all of them in memory.
MOST_ACLS = 50_000
#: The maximum time that a reply waits until this broker uses a stored change.
_APPLIED_S = 5.0


class AclRequests:
    """The handlers of requests that create, describe and delete ACLs.

    ``authorizer`` and ``acls`` are None if the broker has no authorizer.
    """

    def __init__(self, context: BrokerContext, authorizer: Authorizer | None, acls: AclCache | None) -> None:
        self._context = context
        self._authorizer = authorizer
        self._acls = acls

    def create(self, connection: ServerConnection, request: CreateAcls, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._create(self._require(), request))

    async def _create(self, acls: AclCache, request: CreateAcls) -> Reply:
        try:
            wanted = [binding_of(entry) for entry in request.acls]
        except ConfigError as error:
            raise BrokerError(ErrorCode.INVALID_REQUEST, str(error)) from None
        self.check_count(wanted)
        version = await acls.store.add(wanted)
        await acls.applied(version, timeout_s=_APPLIED_S)
        for acl in wanted:
            _log.info("added: %s", acl)
        return Ack(request.cid)

    def check_count(self, wanted: Sequence[AclBinding]) -> None:
        """Raise BrokerError INVALID_REQUEST if the cluster would have too many ACLs after the change."""
        assert self._authorizer is not None
        known = self._authorizer.table.acls
        if len(known) + len(wanted) <= MOST_ACLS:
            return
        count = len(set(known).union(wanted))  # some may exist
        if count > MOST_ACLS:
            detail = f"the cluster would have {count} ACLs, at most {MOST_ACLS} may be"
            raise BrokerError(ErrorCode.INVALID_REQUEST, detail)

    def describe(self, connection: ServerConnection, request: DescribeAcls, body: memoryview) -> None:
        self._require()
        assert self._authorizer is not None
        condition, table = _condition(request.condition), self._authorizer.table
        found = tuple(entry_of(acl) for acl in table.acls if condition.accepts(acl))
        super_users = tuple(sorted(map(str, table.super_users)))
        connection.reply(DescribeAclsReply(request.cid, found, super_users, table.allow_everyone_if_no_acl_found))

    def delete(self, connection: ServerConnection, request: DeleteAcls, body: memoryview) -> None:
        reply_later(self._context, connection, request, self._delete(self._require(), request))

    async def _delete(self, acls: AclCache, request: DeleteAcls) -> Reply:
        removed, version = await acls.store.remove([_condition(condition) for condition in request.conditions])
        await acls.applied(version, timeout_s=_APPLIED_S)
        for acl in sorted(removed):
            _log.info("removed: %s", acl)
        return DeleteAclsReply(request.cid, tuple(map(entry_of, sorted(removed))))

    def _require(self) -> AclCache:
        """Return the ACLs. Raises BrokerError SECURITY_DISABLED if the broker has no authorizer."""
        if self._acls is None:
            detail = "the broker has no authorizer: set super.users, which enables it"
            raise BrokerError(ErrorCode.SECURITY_DISABLED, detail)
        return self._acls


def _condition(condition: AclCondition) -> AclFilter:
    try:
        return condition_of(condition)
    except ConfigError as error:
        raise BrokerError(ErrorCode.INVALID_REQUEST, str(error)) from None
