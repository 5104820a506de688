"""The settings of topics and of brokers: one table for each, with defaults, units and ranges.

Keys have Kafka's names where the meaning is Kafka's. The Python name of a setting with a unit contains the unit. Values
are checked once; afterwards the settings are immutable. The error for a value out of range shows the allowed range. The
error for an unknown key suggests the most similar key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from sparklog.errors import ConfigError

_MAX = 2**63 - 1
#: The maximum length of a setting's value, and of a key in error messages. Any client can create a topic with settings
#: of any length.
_LONGEST_KEY = 100
#: The maximum lengths of a list of listeners or principals, and of a path.
_LONGEST_LIST = 10_000
_LONGEST_PATH = 4096
MIB = 1024 * 1024


class Setting(NamedTuple):
    """One setting of topics or brokers, as described in a settings table.

    ``low`` and ``high`` are the inclusive bounds of a number.
    """

    field: str
    default: Any
    doc: str
    low: int = 0
    high: int = _MAX
    choices: tuple[str, ...] = ()
    #: The maximum length of a value, in characters.
    longest: int = _LONGEST_KEY


TOPIC_SETTINGS: dict[str, Setting] = {
    "cleanup.policy": Setting(
        "cleanup_policy",
        "delete",
        "How old segments are removed: deleted, compacted by key, or both.",
        choices=("delete", "compact", "compact,delete", "delete,compact"),
    ),
    "retention.ms": Setting(
        "retention_ms", 7 * 86_400_000, "Age at which segments of records are deleted; -1: never.", -1
    ),
    "retention.bytes": Setting(
        "retention_bytes", -1, "Partition size above which the oldest segments are deleted; -1: no limit.", -1
    ),
    "retention.wait.for.groups": Setting(
        "retention_wait_for_groups",
        "",
        "Comma-separated consumer groups; retention keeps records until all of them have committed.",
    ),
    "retention.hard.ms": Setting(
        "retention_hard_ms",
        -1,
        "Age at which a sealed segment is deleted even if groups have not committed its records; -1: never.",
        -1,
    ),
    "delete.retention.ms": Setting(
        "delete_retention_ms", 86_400_000, "How long a compacted topic keeps tombstones after cleaning."
    ),
    "min.compaction.lag.ms": Setting("min_compaction_lag_ms", 0, "Minimum age at which records can be compacted."),
    "max.compaction.lag.ms": Setting(
        "max_compaction_lag_ms",
        _MAX // 1_000_000,
        "Maximum age before records become eligible for compaction.",
        1,
        _MAX // 1_000_000,
    ),
    "min.cleanable.dirty.ratio": Setting(
        "min_cleanable_dirty_ratio", 0.5, "Minimum ratio of uncompacted to total bytes at which a log is cleaned.", 0, 1
    ),
    "segment.bytes": Setting("segment_bytes", 1024 * MIB, "Size at which the leader rolls a segment.", 1024, 2**31 - 1),
    "segment.ms": Setting("segment_ms", 7 * 86_400_000, "Age at which the leader rolls a segment.", 1),
    "max.message.bytes": Setting(
        "max_message_bytes", 16 * MIB, "Largest batch, both as sent and uncompressed.", 1024, 1024 * MIB
    ),
    "min.insync.replicas": Setting(
        "min_insync_replicas",
        2,
        "In-sync replicas required to commit records; capped at the replication factor.",
        1,
        32,
    ),
    "unclean.leader.election.enable": Setting(
        "unclean_leader_election", False, "Elect an out-of-sync replica if no in-sync one is alive; may lose records."
    ),
    "replica.lag.time.max.ms": Setting(
        "replica_lag_time_max_ms", 10_000, "How long a follower can lag before the leader removes it from the ISR.", 100
    ),
    "replica.lag.max.messages": Setting(
        "replica_lag_max_messages",
        0,
        "Records that a follower can lag before the leader removes it from the ISR; 0: no limit.",
    ),
    "message.timestamp.type": Setting(
        "timestamp_type",
        "CreateTime",
        "Timestamp set by the producer or by the leader.",
        choices=("CreateTime", "LogAppendTime"),
    ),
    "flush.messages": Setting(
        "flush_messages", 0, "Number of records after which the log is fsynced; 0: left to the OS."
    ),
    "flush.ms": Setting("flush_ms", 0, "Interval at which the log is fsynced; 0: left to the OS."),
    "kafka.value.format": Setting(
        "kafka_value_format",
        "none",
        "How Kafka clients read and write the rows of a topic with a schema: as JSON documents, or not at all.",
        choices=("none", "json"),
    ),
    "restoring": Setting("restoring", False, "A restore is in progress: producers wait, and no records are deleted."),
    "restored.from": Setting(
        "restored_from", "", "Topic id, table and table version that the topic was restored from."
    ),
}

BROKER_SETTINGS: dict[str, Setting] = {
    "default.replication.factor": Setting(
        "default_replication_factor", 3, "Default replication factor of new topics.", 1, 32
    ),
    "num.partitions": Setting("num_partitions", 1, "Default number of partitions of new topics.", 1, 100_000),
    "zookeeper.session.timeout.ms": Setting(
        "session_timeout_ms", 6000, "Time after which a broker without heartbeats is considered dead.", 500, 600_000
    ),
    "zookeeper.connection.timeout.ms": Setting(
        "zk_connection_timeout_ms", 15_000, "Time-out of the first connection to ZooKeeper.", 100, 600_000
    ),
    "zookeeper.ssl.client.enable": Setting("zookeeper_ssl", False, "Connect to ZooKeeper with TLS."),
    "zookeeper.ssl.truststore.location": Setting(
        "zookeeper_ssl_truststore",
        "",
        "PEM file with the certificates of the authorities that may sign ZooKeeper's certificate.",
        longest=_LONGEST_PATH,
    ),
    "zookeeper.ssl.keystore.location": Setting(
        "zookeeper_ssl_keystore",
        "",
        "PEM file with the certificate chain that ZooKeeper's clients present, and its private key.",
        longest=_LONGEST_PATH,
    ),
    "zookeeper.ssl.key.location": Setting(
        "zookeeper_ssl_key",
        "",
        "PEM file with the private key. Empty: it is in the file of the certificate chain.",
        longest=_LONGEST_PATH,
    ),
    "zookeeper.ssl.endpoint.identification.algorithm": Setting(
        "zookeeper_ssl_identification",
        "https",
        "Whether ZooKeeper's certificate must contain its host name: https, or none.",
        choices=("https", "HTTPS", "none"),
    ),
    "zookeeper.digest.file": Setting(
        "zookeeper_digest_file",
        "",
        "File of mode 0600 with a line user:password, which sessions prove to ZooKeeper.",
        longest=_LONGEST_PATH,
    ),
    "zookeeper.set.acl": Setting(
        "zookeeper_set_acl",
        False,
        "Create nodes that ZooKeeper sessions without the digest or the certificate cannot change.",
    ),
    "preferred.leader.rebalance": Setting(
        "preferred_leader_rebalance", True, "Move leadership back to the preferred leader once it is in sync again."
    ),
    "preferred.leader.rebalance.interval.ms": Setting(
        "preferred_leader_rebalance_interval_ms", 30_000, "Interval of checks for preferred leaders.", 100, 86_400_000
    ),
    "broker.replace.after.ms": Setting(
        "broker_replace_after_ms",
        -1,
        "Time after which the replicas of a dead broker are rebuilt on other brokers; -1: never.",
        -1,
    ),
    "unclean.recovery.timeout.ms": Setting(
        "unclean_recovery_timeout_ms",
        30_000,
        "How long to wait for all log end offsets if all in-sync replicas lost data. Then the highest is elected.",
        0,
        86_400_000,
    ),
    "replica.fetch.wait.max.ms": Setting(
        "replica_fetch_wait_max_ms", 500, "Maximum wait of a follower's fetch.", 1, 60_000
    ),
    "replica.fetch.max.bytes": Setting(
        "replica_fetch_max_bytes", 8 * MIB, "Maximum bytes per partition in a response to a follower.", 1024, 512 * MIB
    ),
    "replica.fetch.response.max.bytes": Setting(
        "replica_fetch_response_max_bytes", 32 * MIB, "Maximum bytes of a response to a follower.", 1024, 1024 * MIB
    ),
    "socket.request.max.bytes": Setting("max_frame_bytes", 128 * MIB, "Largest request frame.", 4096, 2**31 - 1),
    "max.in.flight.requests.per.connection": Setting(
        "max_in_flight",
        64,
        "Requests in flight per connection; further requests are not read until one completes.",
        1,
        10_000,
    ),
    "max.connections": Setting(
        "max_connections", 10_000, "Maximum open connections; lower if file descriptors are limited.", 8, 1_000_000
    ),
    "max.connections.per.ip": Setting(
        "max_connections_per_ip", 2**31 - 1, "Maximum open connections of clients from one address.", 1, 2**31 - 1
    ),
    "max.connections.per.user": Setting(
        "max_connections_per_user",
        2**31 - 1,
        "Maximum open connections of clients that have logged in as one user.",
        1,
        2**31 - 1,
    ),
    "connections.max.idle.ms": Setting(
        "connections_max_idle_ms", 600_000, "Idle time after which a client's connection is closed.", 1000, 2**40
    ),
    "queued.max.bytes": Setting(
        "queued_max_bytes", 256 * MIB, "Maximum request bytes in flight per broker.", MIB, 2**40
    ),
    "controlled.stop.timeout.ms": Setting(
        "controlled_stop_timeout_ms",
        8000,
        "How long a stopping broker waits for other brokers to take over its leaderships.",
        0,
        600_000,
    ),
    "log.checkpoint.interval.ms": Setting(
        "checkpoint_interval_ms", 5000, "Interval of high watermark checkpoints.", 100, 600_000
    ),
    "log.retention.check.interval.ms": Setting(
        "retention_check_interval_ms", 30_000, "Interval of retention checks.", 100, 86_400_000
    ),
    "log.set.aside.retention.ms": Setting(
        "set_aside_retention_ms",
        7 * 86_400_000,
        "Minimum time to keep the log of an unknown topic, at least until the leader has its records; -1: forever.",
        -1,
    ),
    "log.dir.group": Setting(
        "log_dir_group",
        "",
        "Group whose members may read the files of log directories. Empty: only the broker's user may.",
    ),
    "log.cleaner.enable": Setting("cleaner_enable", True, "Compact topics whose cleanup.policy includes compact."),
    "log.cleaner.backoff.ms": Setting(
        "cleaner_backoff_ms", 15_000, "Interval of checks for logs to clean.", 10, 86_400_000
    ),
    "log.cleaner.io.max.bytes.per.second": Setting(
        "cleaner_io_bytes", 2**40, "Maximum bytes per second that the cleaner reads and writes.", 1024
    ),
    "log.cleaner.dedupe.buffer.size": Setting(
        "cleaner_buffer_bytes",
        128 * MIB,
        "Memory of the cleaner for keys, 96 bytes each; further keys are written to disk.",
        96 * 1024,
        2**40,
    ),
    "producer.id.expiration.ms": Setting(
        "producer_id_expiration_ms", 86_400_000, "Idle time after which a producer id expires.", 1000
    ),
    "producer.ids.max": Setting(
        "producer_ids_max",
        1_000_000,
        "Maximum producer ids kept by all logs of a broker, 650 bytes each; new producers wait beyond that.",
        100,
    ),
    "groups.max": Setting(
        "groups_max", 500_000, "Maximum consumer groups of the cluster; further groups are refused.", 100
    ),
    "transactional.ids.max": Setting(
        "transactional_ids_max",
        500_000,
        "Maximum transactional ids and sinks of the cluster; further ones are refused.",
        100,
    ),
    "internal.topic.replication.factor": Setting(
        "internal_replication_factor",
        3,
        "Replication factor of internal topics. They are created when this number of brokers is alive.",
        1,
        32,
    ),
    "transaction.state.log.num.partitions": Setting(
        "transaction_partitions", 16, "Partitions of the internal transaction topic; fixed at its creation.", 1, 1000
    ),
    "offsets.topic.num.partitions": Setting(
        "offsets_partitions", 16, "Partitions of the internal topic of group offsets; fixed at its creation.", 1, 1000
    ),
    "transaction.max.timeout.ms": Setting(
        "transaction_max_timeout_ms",
        86_400_000,
        "Maximum duration of a transaction, even if its producer sends heartbeats.",
        1000,
    ),
    "transaction.hanging.after.ms": Setting(
        "transaction_hanging_after_ms",
        900_000,
        "Time that a transaction is open in a partition before the broker checks whether it is hanging.",
        1000,
    ),
    "transactional.id.expiration.ms": Setting(
        "transactional_id_expiration_ms", 7 * 86_400_000, "Idle time after which a transactional id expires.", 1000
    ),
    "sink.id.expiration.ms": Setting(
        "sink_id_expiration_ms",
        30 * 86_400_000,
        "Idle time after which the last committed batch of a streaming query expires.",
        1000,
    ),
    "offsets.retention.ms": Setting(
        "offsets_retention_ms", 7 * 86_400_000, "Idle time after which the committed offsets of a group expire.", 1000
    ),
    "group.min.session.timeout.ms": Setting(
        "group_min_session_timeout_ms", 1000, "Minimum session.timeout.ms of a group member.", 100, 3_600_000
    ),
    "group.max.session.timeout.ms": Setting(
        "group_max_session_timeout_ms", 1_800_000, "Maximum session.timeout.ms of a group member.", 1000
    ),
    "group.min.heartbeat.interval.ms": Setting(
        "group_min_heartbeat_interval_ms", 100, "Minimum heartbeat.interval.ms of a group member.", 10, 60_000
    ),
    "group.max.heartbeat.interval.ms": Setting(
        "group_max_heartbeat_interval_ms", 60_000, "Maximum heartbeat.interval.ms of a group member.", 100, 600_000
    ),
    "group.consumer.session.timeout.ms": Setting(
        "group_consumer_session_timeout_ms",
        45_000,
        "Session timeout of Kafka clients' members in groups of KIP-848.",
        1000,
        3_600_000,
    ),
    "group.consumer.heartbeat.interval.ms": Setting(
        "group_consumer_heartbeat_interval_ms",
        5000,
        "Heartbeat interval of Kafka clients' members in groups of KIP-848.",
        100,
        600_000,
    ),
    "group.initial.rebalance.delay.ms": Setting(
        "group_initial_rebalance_delay_ms",
        3000,
        "How long the first rebalance of an empty group of Kafka's classic protocol waits for more members.",
        0,
        600_000,
    ),
    "group.max.size": Setting("group_max_size", 10_000, "Maximum members of a group.", 1, 100_000),
    "broker.orphan.timeout.ms": Setting(
        "orphan_timeout_ms",
        60_000,
        "How long an unsupervised broker waits before asking to give up its leaderships.",
        1000,
    ),
    "broker.orphan.max.ms": Setting(
        "orphan_max_ms", -1, "How long a broker without a supervisor runs before it stops; -1: keeps running.", -1
    ),
    "fetch.max.bytes": Setting(
        "fetch_max_bytes", 55 * MIB, "Maximum bytes of a response to a consumer.", 1024, 1024 * MIB
    ),
    "fetch.session.slots": Setting("fetch_session_slots", 1000, "Maximum incremental fetch sessions.", 1, 1_000_000),
    "local.reads.enable": Setting(
        "local_reads", True, "Pass open segment files to consumers on the same host, over a Unix socket."
    ),
    "unix.sockets.enable": Setting(
        "unix_sockets", True, "Switch connections of clients and followers on the same host to a Unix socket."
    ),
    "quota.window.size.seconds": Setting(
        "quota_window_seconds", 1, "Seconds of quota that a client may use at once after a pause.", 1, 3600
    ),
    "hot.batches.bytes": Setting("hot_batches_bytes", 64 * MIB, "Memory per broker for the newest batches.", 0, 2**40),
    "listeners": Setting(
        "listeners",
        "",
        "Listeners of each broker, such as CLIENT://0.0.0.0:9092,BROKER://0.0.0.0:9093. Empty: one PLAINTEXT listener.",
        longest=_LONGEST_LIST,
    ),
    "advertised.listeners": Setting(
        "advertised_listeners",
        "",
        "Addresses of the listeners for clients and brokers. Empty: the listener's host, or the broker's host.",
        longest=_LONGEST_LIST,
    ),
    "listener.security.protocol.map": Setting(
        "listener_security_protocol_map",
        "",
        "Security protocol of each listener, such as CLIENT:SASL_SSL,BROKER:SSL. Empty: the listener's name.",
        longest=_LONGEST_LIST,
    ),
    "inter.broker.listener.name": Setting(
        "inter_broker_listener_name", "", "Listener through which brokers and the controller connect to brokers."
    ),
    "kafka.listeners": Setting(
        "kafka_listeners",
        "",
        "Listeners of each broker for Kafka clients, such as SASL_SSL://0.0.0.0:29092. Empty: none.",
        longest=_LONGEST_LIST,
    ),
    "kafka.advertised.listeners": Setting(
        "kafka_advertised_listeners",
        "",
        "Addresses of the listeners for Kafka clients. Empty: the listener's host, or the broker's host.",
        longest=_LONGEST_LIST,
    ),
    "kafka.batch.cache.bytes": Setting(
        "kafka_batch_cache_bytes",
        64 * MIB,
        "Memory per broker for the newest batches of Kafka producers, kept unchanged for Kafka consumers; 0: none.",
        0,
        2**40,
    ),
    "kafka.auto.create.topics.enable": Setting(
        "kafka_auto_create_topics", False, "Create a topic that a Kafka client names in a request for metadata."
    ),
    "inter.broker.principals": Setting(
        "inter_broker_principals",
        "",
        "Principals of certificates that may act as a broker or the controller, separated by semicolons.",
        longest=_LONGEST_LIST,
    ),
    "network.trusted": Setting(
        "network_trusted", False, "Listen on other addresses than loopback without TLS and authentication."
    ),
    "ssl.certificate.location": Setting(
        "ssl_certificate_location", "", "PEM file with the broker's certificate chain.", longest=_LONGEST_PATH
    ),
    "ssl.key.location": Setting(
        "ssl_key_location",
        "",
        "PEM file with the broker's private key. Empty: it is in the certificate's file.",
        longest=_LONGEST_PATH,
    ),
    "ssl.ca.location": Setting(
        "ssl_ca_location", "", "PEM file with the certificates of trusted authorities.", longest=_LONGEST_PATH
    ),
    "controller.ssl.certificate.location": Setting(
        "controller_ssl_certificate_location",
        "",
        "PEM file with the controller's certificate chain. Empty: the broker's certificate.",
        longest=_LONGEST_PATH,
    ),
    "controller.ssl.key.location": Setting(
        "controller_ssl_key_location",
        "",
        "PEM file with the controller's private key. Empty: it is in the certificate's file.",
        longest=_LONGEST_PATH,
    ),
    "ssl.client.auth": Setting(
        "ssl_client_auth",
        "none",
        "Whether clients of SSL listeners present a certificate.",
        choices=("none", "requested", "required"),
    ),
    "ssl.principal.mapping.rules": Setting(
        "ssl_principal_mapping_rules",
        "DEFAULT",
        "Rules that map the subject of a client's certificate to its principal, as in Kafka.",
        longest=_LONGEST_LIST,
    ),
    "ssl.enabled.protocols": Setting(
        "ssl_enabled_protocols",
        "TLSv1.2,TLSv1.3",
        "Versions of TLS that listeners accept.",
        choices=("TLSv1.2,TLSv1.3", "TLSv1.3,TLSv1.2", "TLSv1.3", "TLSv1.2"),
    ),
    "sasl.enabled.mechanisms": Setting(
        "sasl_enabled_mechanisms", "SCRAM-SHA-256,SCRAM-SHA-512", "SASL mechanisms that listeners accept."
    ),
    "sasl.oauthbearer.jwks.endpoint.url": Setting(
        "sasl_oauthbearer_jwks_endpoint_url",
        "",
        "URL (file:///path) of the public keys (JWK set) that verify OAUTHBEARER tokens.",
        longest=_LONGEST_PATH,
    ),
    "sasl.oauthbearer.expected.issuer": Setting(
        "sasl_oauthbearer_expected_issuer", "", "Issuer that tokens must have.", longest=_LONGEST_PATH
    ),
    "sasl.oauthbearer.expected.audience": Setting(
        "sasl_oauthbearer_expected_audience",
        "",
        "Audiences of which a token must have one, separated by commas.",
        longest=_LONGEST_PATH,
    ),
    "sasl.oauthbearer.clock.skew.seconds": Setting(
        "sasl_oauthbearer_clock_skew_seconds",
        30,
        "How far the clocks of the identity provider and of the broker may differ.",
        0,
        3600,
    ),
    "sasl.oauthbearer.sub.claim.name": Setting(
        "sasl_oauthbearer_sub_claim_name", "sub", "Claim of a token that contains the name of the principal."
    ),
    "authorizer.enable": Setting(
        "authorizer_enable",
        "auto",
        "Whether ACLs decide what a principal may do. auto: if super.users is not empty.",
        choices=("auto", "true", "false"),
    ),
    "allow.everyone.if.no.acl.found": Setting(
        "allow_everyone_if_no_acl_found", False, "Whether every principal may use a resource that has no ACL."
    ),
    "super.users": Setting(
        "super_users",
        "",
        "Principals that may do everything, separated by semicolons, such as User:admin;User:CN=ops.",
        longest=_LONGEST_LIST,
    ),
    "delegation.token.max.lifetime.ms": Setting(
        "delegation_token_max_lifetime_ms",
        7 * 86_400_000,
        "Longest lifetime of a delegation token, with all renewals.",
        1,
        366 * 86_400_000,
    ),
    "delegation.token.expiry.time.ms": Setting(
        "delegation_token_expiry_time_ms",
        86_400_000,
        "Time after which a delegation token expires unless it is renewed.",
        1,
        366 * 86_400_000,
    ),
    "delegation.token.expiry.check.interval.ms": Setting(
        "delegation_token_expiry_check_interval_ms",
        3_600_000,
        "Interval at which a broker removes expired delegation tokens.",
        1,
        86_400_000,
    ),
    "connections.max.reauth.ms": Setting(
        "connections_max_reauth_ms", 0, "Time after which a client must log in again; 0: never.", 0
    ),
}

#: Other names of broker settings. Kafka's names of key stores may name PEM files, as with ``ssl.keystore.type=PEM``.
BROKER_ALIASES = {
    "ssl.keystore.location": "ssl.certificate.location",
    "ssl.truststore.location": "ssl.ca.location",
}


class TopicConfig(msgspec.Struct, frozen=True):
    """The effective settings of one topic: its own settings and defaults. ``TOPIC_SETTINGS`` describes each setting."""

    cleanup_policy: str
    retention_ms: int
    retention_bytes: int
    retention_wait_for_groups: str
    retention_hard_ms: int
    delete_retention_ms: int
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    min_cleanable_dirty_ratio: float
    segment_bytes: int
    segment_ms: int
    max_message_bytes: int
    min_insync_replicas: int
    unclean_leader_election: bool
    replica_lag_time_max_ms: int
    replica_lag_max_messages: int
    timestamp_type: str
    flush_messages: int
    flush_ms: int
    kafka_value_format: str
    restoring: bool
    restored_from: str

    @property
    def compacted(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def awaited_groups(self) -> tuple[str, ...]:
        """Return the consumer groups whose commits retention waits for before it deletes records."""
        return tuple(name.strip() for name in self.retention_wait_for_groups.split(",") if name.strip())


class BrokerConfig(msgspec.Struct, frozen=True):
    """The effective settings of one broker: its own settings and defaults. ``BROKER_SETTINGS`` describes each setting.

    ``topic_defaults`` are the cluster's topic settings. A topic's own settings override them.
    """

    default_replication_factor: int
    num_partitions: int
    session_timeout_ms: int
    zk_connection_timeout_ms: int
    zookeeper_ssl: bool
    zookeeper_ssl_truststore: str
    zookeeper_ssl_keystore: str
    zookeeper_ssl_key: str
    zookeeper_ssl_identification: str
    zookeeper_digest_file: str
    zookeeper_set_acl: bool
    preferred_leader_rebalance: bool
    preferred_leader_rebalance_interval_ms: int
    broker_replace_after_ms: int
    unclean_recovery_timeout_ms: int
    replica_fetch_wait_max_ms: int
    replica_fetch_max_bytes: int
    replica_fetch_response_max_bytes: int
    max_frame_bytes: int
    max_in_flight: int
    max_connections: int
    max_connections_per_ip: int
    max_connections_per_user: int
    connections_max_idle_ms: int
    queued_max_bytes: int
    controlled_stop_timeout_ms: int
    checkpoint_interval_ms: int
    retention_check_interval_ms: int
    set_aside_retention_ms: int
    log_dir_group: str
    cleaner_enable: bool
    cleaner_backoff_ms: int
    cleaner_io_bytes: int
    cleaner_buffer_bytes: int
    producer_id_expiration_ms: int
    producer_ids_max: int
    groups_max: int
    transactional_ids_max: int
    internal_replication_factor: int
    transaction_partitions: int
    offsets_partitions: int
    transaction_max_timeout_ms: int
    transaction_hanging_after_ms: int
    transactional_id_expiration_ms: int
    sink_id_expiration_ms: int
    offsets_retention_ms: int
    group_min_session_timeout_ms: int
    group_max_session_timeout_ms: int
    group_min_heartbeat_interval_ms: int
    group_max_heartbeat_interval_ms: int
    group_consumer_session_timeout_ms: int
    group_consumer_heartbeat_interval_ms: int
    group_initial_rebalance_delay_ms: int
    group_max_size: int
    orphan_timeout_ms: int
    orphan_max_ms: int
    fetch_max_bytes: int
    fetch_session_slots: int
    local_reads: bool
    unix_sockets: bool
    quota_window_seconds: int
    hot_batches_bytes: int
    listeners: str
    advertised_listeners: str
    listener_security_protocol_map: str
    inter_broker_listener_name: str
    kafka_listeners: str
    kafka_advertised_listeners: str
    kafka_batch_cache_bytes: int
    kafka_auto_create_topics: bool
    inter_broker_principals: str
    network_trusted: bool
    ssl_certificate_location: str
    ssl_key_location: str
    ssl_ca_location: str
    controller_ssl_certificate_location: str
    controller_ssl_key_location: str
    ssl_client_auth: str
    ssl_principal_mapping_rules: str
    ssl_enabled_protocols: str
    sasl_enabled_mechanisms: str
    sasl_oauthbearer_jwks_endpoint_url: str
    sasl_oauthbearer_expected_issuer: str
    sasl_oauthbearer_expected_audience: str
    sasl_oauthbearer_clock_skew_seconds: int
    sasl_oauthbearer_sub_claim_name: str
    authorizer_enable: str
    allow_everyone_if_no_acl_found: bool
    super_users: str
    delegation_token_max_lifetime_ms: int
    delegation_token_expiry_time_ms: int
    delegation_token_expiry_check_interval_ms: int
    connections_max_reauth_ms: int
    topic_defaults: dict[str, str]


def topic_config(overrides: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> TopicConfig:
    """Check a topic's settings. Return them with the ``defaults`` of the broker and the built-in defaults.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of range.
    """
    return TopicConfig(**_resolve(TOPIC_SETTINGS, {**(defaults or {}), **overrides}))


def broker_config(overrides: Mapping[str, str]) -> BrokerConfig:
    """Check broker settings. Return them with their defaults.

    Topic settings among them become the cluster's topic defaults.

    Raises:
        ConfigError: a key is unknown, a setting is given by two names, or a value has the wrong type or is out of
            range.
    """
    topic_defaults = {key: value for key, value in overrides.items() if key in TOPIC_SETTINGS}
    topic_config(topic_defaults)
    own = _by_main_names({key: value for key, value in overrides.items() if key not in topic_defaults})
    return BrokerConfig(**_resolve(BROKER_SETTINGS, own), topic_defaults=topic_defaults)


def _by_main_names(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with aliases replaced. Raises ConfigError if a setting is given by both of its names."""
    for alias in BROKER_ALIASES.keys() & settings.keys():
        if BROKER_ALIASES[alias] in settings:
            raise ConfigError(f"{alias} and {BROKER_ALIASES[alias]} are the same setting: set one of them")
    return {BROKER_ALIASES.get(key, key): value for key, value in settings.items()}


def in_force(config: BrokerConfig) -> dict[str, str]:
    """Return the effective settings of a broker as text, with the topic defaults that were set for the cluster."""
    own = {key: _text(getattr(config, setting.field)) for key, setting in BROKER_SETTINGS.items()}
    return own | config.topic_defaults


def default_text(setting: Setting) -> str:
    return _text(setting.default)


def allowed(setting: Setting) -> str:
    """Return a description of the values that are allowed for a setting."""
    if isinstance(setting.default, bool):
        return "true or false"
    if setting.choices:
        return " | ".join(setting.choices)
    if isinstance(setting.default, str):
        return "text"
    return f"from {setting.low}" if setting.high == _MAX else f"{setting.low} to {setting.high}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_topic_settings(names: Iterable[str]) -> None:
    """Check that all names are topic settings.

    Raises:
        ConfigError: a name is not a topic setting. The error suggests the most similar setting.
    """
    _check_names(TOPIC_SETTINGS, names)


def _check_names(table: Mapping[str, Setting], names: Iterable[str]) -> None:
    for key in names:
        if key not in table:
            import difflib  # Only an unknown key needs it.

            near = difflib.get_close_matches(key[:_LONGEST_KEY], table, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown setting {key[:_LONGEST_KEY]!r}{hint}")


def _resolve(table: Mapping[str, Setting], overrides: Mapping[str, str]) -> dict[str, Any]:
    _check_names(table, overrides)
    return {
        setting.field: _parse(key, setting, overrides[key]) if key in overrides else setting.default
        for key, setting in table.items()
    }


def _parse(key: str, setting: Setting, text: str) -> Any:
    value = str(text).strip()
    if len(value) > setting.longest:
        raise ConfigError(f"{key}: expected at most {setting.longest} characters, found {len(value)}")
    if isinstance(setting.default, bool):
        if value.lower() not in {"true", "false"}:
            raise ConfigError(f"{key}={value!r}: expected true or false")
        return value.lower() == "true"
    if setting.choices:
        if value not in setting.choices:
            raise ConfigError(f"{key}={value!r}: expected one of {', '.join(setting.choices)}")
        return value
    if isinstance(setting.default, str):
        return value
    is_part = isinstance(setting.default, float)
    try:
        number = float(value) if is_part else int(value)
    except ValueError:
        raise ConfigError(f"{key}={value!r}: expected a {'' if is_part else 'whole '}number") from None
    if not setting.low <= number <= setting.high:
        raise ConfigError(f"{key}={number}: expected {setting.low} to {setting.high}")
    return number
