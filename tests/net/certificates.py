"""Certificates of a private authority for tests, as PEM files."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import trustme

from sparklog.net.client_security import ClientSecurity
from sparklog.net.tls import PemFiles, ServerTls
from sparklog.security.listeners import ClientAuth
from sparklog.security.mapping_rules import MappingRules

HOSTS = ("127.0.0.1", "localhost")


class Certificates:
    """An authority, and the files that it has issued in one directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self._authority = trustme.CA()
        self.ca = str(directory / "ca.pem")
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *hosts: str, common_name: str = "", days: float = 30) -> str:
        """Issue a certificate with its key in one file, and return its path. An existing file is replaced."""
        until = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=days)
        issued = self._authority.issue_cert(
            *(hosts or HOSTS),
            common_name=common_name or None,
            organization_name="Example",
            not_before=until - dt.timedelta(days=365),
            not_after=until,
        )
        path = self.directory / f"{name}.pem"
        new = self.directory / f"{name}.new"
        issued.private_key_and_cert_chain_pem.write_to_path(str(new))
        new.replace(path)
        return str(path)

    def server(self, client_auth: ClientAuth = ClientAuth.NONE, rules: str = "") -> ServerTls:
        files = PemFiles(self.ca, self.issue("broker", common_name="broker"))
        return ServerTls(files, client_auth, MappingRules(rules))

    def client(self, certificate: str = "", **more: str) -> ClientSecurity:
        settings = {"security.protocol": "SSL", "ssl.ca.location": self.ca, **more}
        if certificate:
            settings["ssl.certificate.location"] = certificate
        return ClientSecurity.parse(settings)
