"""Kafka's wire protocol on a listener: the decoders and the request handlers of its connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from sparklog.broker.kafka.call import Handler, NativeHandlers
from sparklog.broker.kafka.dispatcher import KafkaHandler, RequestQuotas
from sparklog.broker.requests.slices import Slices
from sparklog.errors import ErrorCode
from sparklog.kafka.connection import KafkaServerEnd
from sparklog.kafka.wire import API_VERSIONS, ApiKey, RequestHeader, is_supported
from sparklog.kafka.wire.metadata import ApiVersion, ApiVersionsResponse, FinalizedFeatureKey, SupportedFeatureKey
from sparklog.net.server_connection import ServerConnection
from sparklog.net.unix_tokens import TokenIssuer

#: The APIs that the end of a connection handles itself.
_ANSWERED_BY_CONNECTION = frozenset({ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE})
#: The features that ApiVersions names, and their highest levels. Source: Kafka's KIP-584.
FEATURES: dict[str, int] = {"transaction.version": 2}


class KafkaProtocol:
    """Kafka's protocol on a listener, for the requests of clients. ``handlers`` has the handler of each served API.

    ``natives`` are the handlers of sparklog's own requests, which the handlers of Kafka's requests call. The protocol
    calls ``on_lost`` with each connection that has ended. ``quotas`` limits the time of requests, and ``slices``
    runs the work on large requests.
    """

    has_peers = False
    answers_in_order = True

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        natives: NativeHandlers,
        *,
        max_frame_bytes: int,
        counters: Counter[str],
        on_lost: Callable[[ServerConnection], None],
        quotas: RequestQuotas,
        slices: Slices,
    ) -> None:
        self._quotas = quotas
        self._slices = slices
        self._handlers = handlers
        self._natives = natives
        self._max_frame_bytes = max_frame_bytes
        self._counters = counters
        self._on_lost = on_lost
        self._versions = [
            ApiVersion(api_key=int(key), min_version=first, max_version=last)
            for key, (first, last) in sorted(API_VERSIONS.items())
            if key in handlers or key in _ANSWERED_BY_CONNECTION
        ]

    def new_end(self, connection: ServerConnection, transport: asyncio.BaseTransport) -> KafkaServerEnd:
        login = connection.session.login
        return KafkaServerEnd(self._api_versions, self._max_frame_bytes, login, served=self._handlers)

    def new_handler(self, connection: ServerConnection) -> KafkaHandler:
        return KafkaHandler(
            self._handlers,
            self._natives,
            self._counters,
            connection,
            self._on_lost,
            quotas=self._quotas,
            slices=self._slices,
        )

    def token_issuer(self, connection: ServerConnection, transport: asyncio.BaseTransport) -> TokenIssuer | None:
        return None

    def _api_versions(self, header: RequestHeader) -> ApiVersionsResponse:
        """Return the APIs that this listener serves.

        If the version of the request is unknown, return the error UNSUPPORTED_VERSION and only the versions of
        ApiVersions. Source: KIP-511.
        """
        if not is_supported(header.api_key, header.api_version):
            own = [version for version in self._versions if version.api_key == ApiKey.API_VERSIONS]
            return ApiVersionsResponse(error_code=ErrorCode.UNSUPPORTED_VERSION, api_keys=own)
        supported = [
            SupportedFeatureKey(name=name, min_version=0 if header.api_version >= 4 else 1, max_version=level)
            for name, level in FEATURES.items()
        ]
        finalized = [
            FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            for name, level in FEATURES.items()
        ]
        return ApiVersionsResponse(
            api_keys=self._versions,
            supported_features=supported,
            finalized_features_epoch=0 if FEATURES else -1,
            finalized_features=finalized,
        )
