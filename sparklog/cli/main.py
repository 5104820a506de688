"""The ``sparklog`` command. An error prints one line on stderr and sets an exit code; no command prints a traceback.

Exit codes: 0 success; 1 an operation failed or the cluster refused it; 2 wrong command or settings; 3 timeout or no
reachable broker; 130 Ctrl-C; 141 closed output pipe. docs/cli.md describes every command.
"""

from __future__ import annotations

import sparklog.cli.starting  # isort: split

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from sparklog.cli.acls import acls
from sparklog.cli.brokers import brokers
from sparklog.cli.certs import certs
from sparklog.cli.cluster import cluster
from sparklog.cli.config import config
from sparklog.cli.consume import consume
from sparklog.cli.controller import controller
from sparklog.cli.groups import groups
from sparklog.cli.output import note, print_line
from sparklog.cli.partitions import partitions
from sparklog.cli.perf import perf
from sparklog.cli.produce import produce
from sparklog.cli.quotas import quotas
from sparklog.cli.salvage import salvage
from sparklog.cli.segments import segments
from sparklog.cli.tokens import tokens
from sparklog.cli.top import top
from sparklog.cli.topics import topics
from sparklog.cli.transactions import transactions
from sparklog.cli.users import users
from sparklog.cli.zookeeper import zookeeper
from sparklog.cli.zookeeper_acls import open_tree, secure_tree
from sparklog.client.errors import ClientTimeout
from sparklog.errors import BrokerError, ConfigError, ErrorCode, SparklogError
from sparklog.net.client_security import CLIENT_CONFIG

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMEOUT = 3
EXIT_INTERRUPTED = sparklog.cli.starting.EXIT_INTERRUPTED
EXIT_PIPE = 141

_CLIENT_CONFIG = "--client-config"

#: The class of click's usage errors. Typer bundles click since 0.20 and exports no public name for the class.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="sparklog",
    help="Manage topics, records, groups, transactions and brokers of a sparklog cluster."
    " Exit codes: 0 success, 1 refused or failed, 2 wrong command or setting, 3 no response in time,"
    " 130 Ctrl-C or declined, 141 output pipe closed.\n\n"
    "Example: SPARKLOG_BOOTSTRAP=127.0.0.1:9092 sparklog topics list",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cluster, name="cluster")
app.add_typer(topics, name="topics")
app.command("produce")(produce)
app.command("consume")(consume)
app.add_typer(groups, name="groups")
app.add_typer(transactions, name="transactions")
app.add_typer(brokers, name="brokers")
app.add_typer(partitions, name="partitions")
app.add_typer(config, name="config")
app.add_typer(perf, name="perf")
app.command("top")(top)
segments.command("salvage")(salvage)
app.add_typer(segments, name="segments")
zookeeper.command("secure")(secure_tree)
zookeeper.command("open")(open_tree)
app.add_typer(zookeeper, name="zookeeper")
app.add_typer(certs, name="certs")
app.add_typer(users, name="users")
app.add_typer(tokens, name="tokens")
app.add_typer(acls, name="acls")
app.add_typer(quotas, name="quotas")
app.command("controller")(controller)


def _version(wanted: bool) -> None:
    if wanted:
        print_line(f"sparklog {sparklog.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
    client_config: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads this on Python 3.10 as well
        typer.Option(
            _CLIENT_CONFIG,
            envvar=CLIENT_CONFIG,
            metavar="FILE",
            help="File with the settings for TLS and login. May also follow the command.",
        ),
    ] = None,
) -> None:
    if client_config is not None:
        # Every client of the command reads the variable. The last value comes back for the caller of ``run``.
        before = os.environ.get(CLIENT_CONFIG)
        os.environ[CLIENT_CONFIG] = str(client_config)
        context.call_on_close(lambda: _restore(before))


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(CLIENT_CONFIG, None)
    else:
        os.environ[CLIENT_CONFIG] = before


def main() -> None:
    """Run the command that the program's arguments name, and exit with its exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        result = app(_with_common_options_first(arguments), prog_name="sparklog", standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as end:
        return int(end.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except SystemExit as end:  # typer's own answer to a broken pipe
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return _pipe_gone()
    except BrokenPipeError:
        return _pipe_gone()
    except _UsageError as error:
        return _usage(error)
    except SparklogError as error:
        return _failed(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _say(f"{where}{error.strerror or error}")
        return EXIT_FAILED
    return int(result) if isinstance(result, int) else 0


def _with_common_options_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``--client-config``, which is allowed after the command too, before the command."""
    own = list(arguments)
    end = own.index("--") if "--" in own else len(own)
    for at in range(end):
        count = 2 if own[at] == _CLIENT_CONFIG else 1 if own[at].startswith(f"{_CLIENT_CONFIG}=") else 0
        if count:
            return own[at : at + count] + own[:at] + own[at + count :]
    return own


def _pipe_gone() -> int:
    # Otherwise Python would flush stdout again at exit, and print an error.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)
    os.close(nowhere)
    return EXIT_PIPE


def _usage(error: Exception) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        return EXIT_USAGE  # the help text has been printed already
    context = getattr(error, "ctx", None)
    format_message = getattr(error, "format_message", None)
    message = " ".join(str(format_message() if format_message else error).split())
    path = context.command_path if context is not None else "sparklog"
    _say(f"{message} (see '{path} --help')")
    return EXIT_USAGE


def _failed(error: SparklogError) -> int:
    if isinstance(error, ClientTimeout):
        _say(str(error))
        return EXIT_TIMEOUT
    if isinstance(error, ConfigError):
        _say(str(error))
        return EXIT_USAGE
    if isinstance(error, BrokerError) and error.code == ErrorCode.NETWORK_EXCEPTION:
        _say(str(error))
        return EXIT_TIMEOUT
    _say(str(error))
    return EXIT_FAILED


def _say(message: str) -> None:
    note(f"sparklog: {' '.join(message.split())}")


sparklog.cli.starting.started()

if __name__ == "__main__":
    main()
