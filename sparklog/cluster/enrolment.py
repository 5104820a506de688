"""The issue of certificates for the hosts of a secure cluster: each host makes its own key, and the driver signs.

This module is used if the option ``--secure`` is set and Spark may run on several hosts.

Spark carries the messages in both directions, over a channel that it authenticates and encrypts:

1. A barrier task that finds no current certificate on its host makes a key there, and ends. Its result is a signing
   request. All tasks of the generation then end as well. Running brokers keep running.
2. The driver checks that the requested names are names of the executors' hosts, and signs.
3. The next generation's tasks receive the certificates in Spark's task closure, and write them beside the keys.

A private key never leaves its host. ``spark_access`` checks the channel before the first generation. None of this needs
ZooKeeper, because a task needs its certificate before it may open a session to ZooKeeper.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from sparklog.cluster import runtime_directory
from sparklog.cluster.generation import Enrolment, GenerationSpec
from sparklog.errors import ClusterError, ConfigError, SparklogError
from sparklog.extras import require_cryptography

log = logging.getLogger(__name__)

#: The name of a host's certificate among the files of its directory.
NAME = "broker"
#: The prefix of the result of a task whose generation ends because a host needs a new certificate.
_ENDING = "certificates "
#: The age at which the driver ends a generation, so that the tasks of the next generation check their certificates. A
#: task replaces a certificate that expires within 30 days. The interval is shorter, so no certificate expires between
#: two checks.
CHECK_INTERVAL_S = 20 * 86_400.0


class _Ending(msgspec.Struct, frozen=True):
    """The result of a task that ends because a host needs a new certificate.

    Both texts are empty if the task's own host has a certificate.
    """

    request: str = ""
    problem: str = ""


def enrol(enrolment: Enrolment, host: str) -> str:
    """Install the certificate that the driver has signed for this host. Call this in a task, on the host.

    Return an empty string if the host has a current certificate. Otherwise return the result with which the task must
    end: it contains a signing request, or the reason why the host could not make a request.
    """
    try:
        request = _request(enrolment, host)
    except (SparklogError, OSError) as error:
        return _ending(_Ending(problem=f"{host}: {error}"))
    return _ending(_Ending(request=request)) if request else ""


def no_request() -> str:
    """Return the result of a task whose host needs no new certificate, although other hosts need one."""
    return _ending(_Ending())


def has_ended_for_certificates(endings: Iterable[str]) -> bool:
    """Return whether a generation ended because a host needs a new certificate. ``endings`` are its tasks' results."""
    return any(ending.startswith(_ENDING) for ending in endings)


class CertificateSigner:
    """The signer in the driver. It signs the requests of tasks, and gives the certificates to the next generation.

    ``directory`` has the CA. ``executor_hosts`` returns the hosts of the application's executors, as Spark knows them.
    ``settings`` are the broker settings with the paths of a host's files. ``alias`` is the advertised host of all
    brokers, if the operator has set one.
    """

    def __init__(
        self,
        directory: Path,
        cluster_id: str,
        *,
        settings: dict[str, str],
        executor_hosts: Callable[[], Sequence[str]],
        alias: str = "",
    ) -> None:
        self._directory = directory
        self._cluster_id = cluster_id
        self._settings = settings
        self._executor_hosts = executor_hosts
        self._alias = alias
        self._certificates: tuple[str, ...] = ()

    def completed(self, spec: GenerationSpec) -> GenerationSpec:
        """Return ``spec`` with the CA's certificate, the signed certificates, and the broker settings for all hosts."""
        from sparklog.cluster import certificates

        ca = certificates.ca_certificate(self._directory)
        enrolment = Enrolment(self._cluster_id, str(self._directory), ca, self._certificates)
        return structs.replace(spec, settings=self._settings, enrolment=enrolment)

    def sign(self, endings: Iterable[str]) -> None:
        """Sign the requests in the results of tasks that ended because a host needs a new certificate.

        ``endings`` are the results of all tasks of one generation.

        Raises:
            ClusterError: a host could not make a request, or asks for a name that is not its own.
        """
        parsed = [msgspec.json.decode(text.removeprefix(_ENDING), type=_Ending) for text in endings]
        if problems := [ending.problem for ending in parsed if ending.problem]:
            raise ClusterError(f"no certificate for {'; '.join(dict.fromkeys(problems))}")
        requests = dict.fromkeys(ending.request for ending in parsed if ending.request)
        try:
            self._certificates = tuple(self._signed(request) for request in requests)
        except ConfigError as error:
            raise ClusterError(f"a host's certificate was not signed: {error}") from None

    def _signed(self, request: str) -> str:
        from sparklog.cluster import certificates

        hosts = certificates.requested_hosts(request)
        executors = self._executor_hosts()
        known = [*executors, *([self._alias] if self._alias else [])]
        several = _are_several_hosts(executors)
        for host in hosts:
            if several and _is_loopback(host):
                raise ConfigError(f"a task requests the name {host}, which several hosts have")
            if not _is_one_of(host, known, by_loopback=not several):
                raise ConfigError(
                    f"a task requests the name {host}, but Spark has no executor there (executors:"
                    f" {', '.join(sorted(set(known)))}): make the names of hosts resolve on the driver's host"
                )
        log.info("signed the certificate of host %s", ", ".join(hosts))
        subject = certificates.Subject(NAME, hosts, "broker", self._cluster_id)
        return certificates.sign(self._directory, request, subject)


def _request(enrolment: Enrolment, host: str) -> str:
    """Return the signing request of this host, or an empty string if it has a current certificate.

    Tasks of the same host share its key. Raises SparklogError or OSError if a file cannot be used.
    """
    require_cryptography("--secure")
    from sparklog.cluster import certificates

    directory = Path(enrolment.directory)
    directory.mkdir(0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.geteuid():
        raise ConfigError(f"{directory} belongs to another user than the executors, {os.geteuid()}")
    directory.chmod(0o700)
    with runtime_directory.host_lock():
        certificates.trust(directory, enrolment.ca)
        subject = certificates.Subject(NAME, (host,), "broker", enrolment.cluster_id)
        for certificate in enrolment.certificates:
            certificates.accept(directory, NAME, certificate)
        return "" if certificates.is_current(directory, subject) else certificates.request(directory, subject)


def _are_several_hosts(executors: Collection[str]) -> bool:
    """Return whether the executors may run on several hosts.

    They run on the driver's host alone if all addresses of their names belong to this host.
    """
    return len(set(executors)) > 1 and not all(
        (found := _addresses(name)) and all(map(_is_own, found)) for name in executors
    )


def _is_own(address: str) -> bool:
    """Return whether this host has this address: it is a loopback address, or a socket can be bound to it."""
    if _is_loopback(address):
        return True
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _is_one_of(host: str, known: Sequence[str], *, by_loopback: bool) -> bool:
    """Return whether ``host`` is one of the ``known`` names, or has an address of one of them.

    A shared loopback address counts only with ``by_loopback``. The driver's host may have one for its own name, which
    then shares it with ``localhost``.
    """
    if host in known:
        return True
    addresses = {address for address in _addresses(host) if by_loopback or not _is_loopback(address)}
    return any(addresses & _addresses(name) for name in known)


def _is_loopback(host: str) -> bool:
    """Return whether this is a loopback address or a name that each host has for itself, such as ``localhost``."""
    name = host.lower().rstrip(".")
    if name in {"localhost", "localhost.localdomain"} or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _addresses(host: str) -> frozenset[str]:
    try:
        return frozenset(str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return frozenset()


def _ending(ending: _Ending) -> str:
    return _ENDING + msgspec.json.encode(ending).decode()
