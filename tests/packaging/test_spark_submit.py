"""Tests of ``spark-submit.sh`` in a copy of the project: the first run, later runs, and its errors.

The copy's Python reuses the packages of this test run's environment, so that 400 MB need not be unpacked again.
``tests/run`` itself begins with a fresh environment that gets all of them.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sparklog.delta.session import PACKAGE
from tests.conftest import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.extended, pytest.mark.timeout(900)]

#: The files of a clone.
PARTS = (
    "sparklog",
    "jobs",
    "conf",
    "setup.cfg",
    "setup.py",
    "pyproject.toml",
    "spark-submit.sh",
    "pyspark_sparklog.py",
    "README.md",
    "LICENSE",
)

#: Programs that the script needs. Java is not among them.
TOOLS = (
    *("bash", "sh", "env", "cat", "cksum", "dirname", "find", "head", "id", "ls", "mktemp", "mv"),
    *("printf", "readlink", "rm", "sed", "sort", "tail", "tar", "tr", "uname", "xargs"),
)

#: A real Python, except for the environments that it creates.
LENDING_PYTHON = """#!/bin/sh
"{python}" "$@" || exit
case $1$2 in
    -mvenv) for last; do :; done
        echo '{packages}' >"$last"/lib/python{version}/site-packages/lent.pth ;;
esac
"""

PROBE = """
import os
import sys
import sparklog
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
print("arguments", sys.argv[1:], "of", spark.sparkContext.appName, "on", spark.sparkContext.master)
print("package", sparklog.__file__)
print("scheduler", spark.conf.get("spark.scheduler.mode"))
java = spark._jvm.java.lang
print("java", list(java.management.ManagementFactory.getRuntimeMXBean().getInputArguments()))
print("threads", os.environ.get("OMP_NUM_THREADS"), java.System.getenv("OMP_NUM_THREADS"))
try:
    spark.read.format("sparklog").load()
except Exception as error:
    print("source:", error)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("clone")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target / part)
    (target / "jobs" / "probe.py").write_text(PROBE)
    return target


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = tmp_path_factory.mktemp("python") / "python3"
    paths = {"python": sys.executable, "packages": sysconfig.get_path("purelib")}
    program.write_text(LENDING_PYTHON.format(version=sysconfig.get_python_version(), **paths))
    program.chmod(0o755)
    return str(program)


def environment(**changes: str) -> dict[str, str]:
    """Return a user's environment, without the variables of this test run."""
    private = (
        "PYTHONPATH",
        "PYSPARK_PYTHON",
        "PYSPARK_DRIVER_PYTHON",
        "SPARK_CONF_DIR",
        "VIRTUAL_ENV",
        "OMP_NUM_THREADS",
    )
    return {**{key: value for key, value in os.environ.items() if key not in private}, **changes}


def submit(clone: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(clone / "spark-submit.sh"), *arguments],
        cwd=clone.parent,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(clone: Path, python: str) -> list[str]:
    """Return the output of two first runs at the same time."""
    runs = [
        subprocess.Popen(
            [str(clone / "spark-submit.sh"), "--setup"],
            env=environment(PYTHON=python),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    return outputs


def test_one_of_two_first_runs_installs_and_both_succeed(installed: list[str]) -> None:
    assert sorted("creating .venv" in output for output in installed) == [False, True]
    assert sorted(output.count("\n") for output in installed) == [0, 2]


def processor_s() -> float:
    """Return the processor time of all ended child processes. It does not depend on the load of the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_later_runs_print_nothing_and_start_quickly(clone: Path, installed: list[str]) -> None:
    before = processor_s()
    done = submit(clone, "--setup")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert processor_s() - before < 1


def test_a_job_finds_the_source_without_registration(clone: Path, installed: list[str]) -> None:
    done = submit(clone, "--master", "local[1]", "probe", "--conf", "spark.app.name=a name", "--", "--master", "x y")
    assert "arguments ['--master', 'x y'] of a name on local[1]" in done.stdout, done.stderr
    assert f"package {clone}/.venv/" in done.stdout
    assert "scheduler FAIR" in done.stdout
    assert "'-XX:CompileThresholdScaling=4'" in done.stdout
    assert "threads None 1" in done.stdout, "the lines must come from Spark's processes and not from the job's own"
    # The error is the source's own: Spark found it by its name, and its options are missing.
    assert "DATA_SOURCE_NOT_FOUND" not in done.stdout
    assert "bootstrap.servers" in done.stdout or "subscribe" in done.stdout


def test_a_job_on_this_machine_listens_on_loopback(clone: Path, installed: list[str]) -> None:
    (clone / "words.py").write_text(
        "import os\nprint(os.environ['PYSPARK_SUBMIT_ARGS'], os.environ.get('SPARK_LOCAL_IP'))\n"
    )
    job = str(clone / "words.py")
    done = submit(clone, "--master", "local[2]", job)
    sockets = f"--conf spark.python.unix.domain.socket.dir=/tmp/sparklog-{os.geteuid()} "
    assert done.stdout == (
        f"{sockets}--conf spark.driver.host=127.0.0.1 --conf spark.driver.bindAddress=127.0.0.1"
        " --conf spark.authenticate=true --conf spark.ui.killEnabled=false"
        " --master local\\[2\\] pyspark-shell 127.0.0.1\n"
    ), done.stderr
    done = submit(clone, "--master=local", job, SPARK_LOCAL_IP="127.0.0.9")
    assert done.stdout.startswith(f"{sockets}--conf spark.driver.host=127.0.0.9 "), done.stderr
    done = submit(clone, "--master", "spark://local:7077", job)
    assert done.stdout == "--master spark://local:7077 pyspark-shell None\n", done.stderr


def test_only_jobs_that_need_delta_get_it(clone: Path, installed: list[str]) -> None:
    (clone / "words.py").write_text("import os\nprint(os.environ['PYSPARK_SUBMIT_ARGS'])\n")
    given = ("--packages", "a:b:1", "--conf", "x=y", str(clone / "words.py"))
    plain = submit(clone, *given)
    assert plain.stdout == "--conf x=y --packages a:b:1 pyspark-shell\n", plain.stderr
    done = submit(clone, "--delta", *given)
    assert done.stdout.startswith(f"--packages {PACKAGE}\\,a:b:1 --conf spark.sql.extensions="), done.stderr
    assert done.stdout.endswith("--conf x=y pyspark-shell\n")
    done = submit(clone, "archive", "--help")
    assert "usage: spark-submit.sh archive" in done.stdout, done.stderr
    assert submit(clone, "--setup").stderr == "", "the environment must be the common one, with more packages"


def test_changed_and_deleted_sources_are_installed(clone: Path, installed: list[str]) -> None:
    extra = clone / "sparklog" / "extra.py"
    extra.write_text("VALUE = 1\n")
    assert submit(clone, "--setup").stderr == "sparklog: installing the changed sources\n"
    found = list(clone.glob(".venv/lib/python3*/site-packages/sparklog/extra.py"))
    assert len(found) == 1
    extra.unlink()
    assert submit(clone, "--setup").returncode == 0
    assert not found[0].exists()
    assert not (clone / "build").exists()
    assert not list(clone.glob("*.egg-info"))


def test_an_unknown_job_is_one_line_with_the_known_ones(clone: Path, installed: list[str]) -> None:
    done = submit(clone, "clutser")
    assert done.returncode == 2
    assert done.stderr.startswith("sparklog: no job 'clutser': expected one of archive cluster demo pipeline")
    assert done.stderr.count("\n") == 1


def without_java(directory: Path, **programs: str) -> str:
    """Return a PATH with the programs that the script needs, without Java, and with stand-ins of the test."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (directory / tool).symlink_to(found)
    for name, text in programs.items():
        program = directory / name.replace("_", "-")
        program.unlink(missing_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return str(directory)


def test_a_missing_java_is_one_line_and_exit_2(clone: Path, installed: list[str], tmp_path: Path) -> None:
    done = submit(clone, "probe", PATH=without_java(tmp_path, id="echo 1000"), JAVA_HOME="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "sparklog: no Java 17 or newer found in JAVA_HOME or PATH:"
        " install one (for example openjdk-17-jre-headless or temurin-17-jre)\n"
    )


def test_a_too_old_java_counts_as_missing(clone: Path, installed: list[str], tmp_path: Path) -> None:
    old = tmp_path / "jdk8"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "java").write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    (old / "bin" / "java").chmod(0o755)
    (tmp_path / "bin").mkdir()
    path = without_java(tmp_path / "bin", id="echo 1000")
    assert submit(clone, "probe", PATH=path, JAVA_HOME=str(old)).returncode == 2


@pytest.mark.skipif(not Path("/etc/debian_version").exists(), reason="the script installs Java only on Debian")
def test_root_on_debian_gets_java_by_apt(clone: Path, installed: list[str], tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "bin").mkdir()
    path = without_java(tmp_path / "bin", id="echo 0", apt_get=f'echo "$@" >>{calls}; exit 1')
    done = submit(clone, "probe", PATH=path, JAVA_HOME="")
    assert done.returncode == 2
    assert "installing openjdk-17-jre-headless with apt-get" in done.stderr
    assert "could not install openjdk-17-jre-headless" in done.stderr
    assert calls.read_text().startswith("-qq update")
