"""The error code and message of one entry of a Kafka response, such as one topic of several."""

from __future__ import annotations

from typing import NamedTuple

from sparklog.broker.kafka.error_codes import REFUSALS, KafkaError, kafka_error
from sparklog.errors import BrokerError, ClusterError, ErrorCode

#: The maximum length of a message. A message may repeat a resource name of any length from the client.
_LONGEST = 1000
#: The errors that concern one entry. The other entries of the request are still handled.
FAILURES = (*REFUSALS, ClusterError)


class ItemError(NamedTuple):
    """The error of one entry: Kafka's code and a message, or 0 and None for success."""

    code: int = 0
    message: str | None = None


SUCCESS = ItemError()


def item_error(error: BrokerError | KafkaError | ClusterError) -> ItemError:
    """Return the code and the message with which a Kafka response reports ``error``."""
    if isinstance(error, ClusterError):  # ZooKeeper is not reachable at present: the client may try again
        return ItemError(ErrorCode.COORDINATOR_NOT_AVAILABLE, str(error)[:_LONGEST])
    code, message = kafka_error(error)
    return ItemError(code, message[:_LONGEST])


def refused(code: ErrorCode | int, message: str) -> ItemError:
    """Return the error of an entry that the handler refuses by its own checks of the Kafka request."""
    return ItemError(int(code), message[:_LONGEST])
