"""``sparklog certs``: a certificate authority and certificates for development."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparklog.cli.options import AsJson
from sparklog.cli.output import done
from sparklog.extras import require_cryptography

if TYPE_CHECKING:
    from sparklog.cluster.certificates import CertificateFiles

certs = typer.Typer(
    help="Certificates for development: create a CA, issue certificates. Production uses your own CA.",
    no_args_is_help=True,
)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the CA: ca.pem and ca-key.pem.")]


@certs.command("ca")
def create_ca(
    directory: Directory,
    *,
    name: Annotated[str, typer.Option(help="Common name of the CA.")] = "sparklog development CA",
    days: Annotated[int, typer.Option(min=1, max=36_500, help="Days until the CA expires.")] = 3650,
    as_json: AsJson = False,
) -> None:
    """Create a CA for development: a key of mode 0600 and a certificate that clients and brokers trust.

    Example: sparklog certs ca ./certs
    """
    require_cryptography("certs ca")
    from sparklog.cluster import certificates

    files = certificates.create_ca(directory, name=name, days=days)
    done(_named(files), f"created {files.certificate} and {files.key}", as_json=as_json)


@certs.command("issue")
def issue(
    directory: Directory,
    name: Annotated[str, typer.Argument(help="Common name, which is also the name of the files.")],
    *,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="Name or address at which clients reach the owner; repeatable.")
    ] = None,
    role: Annotated[str, typer.Option(help="Role in the cluster: broker or controller; empty for a client.")] = "",
    cluster_id: Annotated[str, typer.Option(help="Id of the cluster in which the owner has the role.")] = "",
    into: Annotated[Path | None, typer.Option(help="Directory for the files; default: the CA's.")] = None,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="Days until the certificate expires.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Issue a certificate with a new key. A certificate of this name is replaced.

    Brokers load changed files for new connections, without a restart.

    Example: sparklog certs issue ./certs broker-1 --host broker1.example.com --role broker --cluster-id kZ3u
    """
    require_cryptography("certs issue")
    from sparklog.cluster import certificates

    subject = certificates.Subject(name, tuple(hosts or ()), role, cluster_id)
    files = certificates.issue(directory, subject, into=into, days=days)
    done(_named(files), f"issued {files.certificate} with the key {files.key}", as_json=as_json)


def _named(files: CertificateFiles) -> dict[str, str]:
    return {"certificate": str(files.certificate), "key": str(files.key)}
