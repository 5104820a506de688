"""The operations of a multi (a ZooKeeper transaction)."""

from __future__ import annotations

from typing import NamedTuple


class Create(NamedTuple):
    path: str
    data: bytes
    ephemeral: bool = False


class SetData(NamedTuple):
    path: str
    data: bytes
    version: int = -1


class Delete(NamedTuple):
    path: str
    version: int = -1


class Check(NamedTuple):
    path: str
    version: int


Op = Create | SetData | Delete | Check
