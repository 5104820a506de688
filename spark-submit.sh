#!/usr/bin/env bash
# Installs sparklog on first use, then submits a job: ./spark-submit.sh [Spark options] [job] [job arguments]
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: ./spark-submit.sh [Spark options] [job] [job arguments]
       ./spark-submit.sh --setup [extra]       only create .venv and install (extra: test, docs, bench, delta, compiled)

Submits jobs/<job>.py with conf/. The default job is "cluster", which starts brokers and keeps them running.
Spark's options (--master, --conf, --deploy-mode, --packages, ...) are passed to Spark at any position; everything
after -- is passed to the job. --pack sends this Python environment to the executors of a Spark cluster.
--delta adds Delta Lake to your own job, as in the job archive: its settings, and its package, which Spark downloads
from Maven Central on first use.

  ./spark-submit.sh                                   start three brokers on this machine, data in ./data
  ./spark-submit.sh cluster --secure                  the same with TLS, a login and ACLs
  ./spark-submit.sh cluster --help                    show the arguments of a job
  ./spark-submit.sh demo                              write data, kill an executor and a broker, read the same data
  ./spark-submit.sh pipeline                          run several exactly-once steps over topics
  ./spark-submit.sh archive --topics a,b --to /lake   archive topics in Delta tables continuously
  ./spark-submit.sh --master spark://host:7077 --pack cluster --zookeeper zk1:2181/log --log-dirs /disk1/log \
                    --trusted-network             (or with TLS and logins, see --secure: docs/security.md)

--setup compiled compiles the modules that handle requests. It needs a C compiler and two minutes, also for later
installs of changed sources. The Python code is the same; sending single records takes less time.

PYTHON sets the Python (3.10 to 3.13) for .venv; the default is the newest one in PATH that was built with
optimisations. JAVA_HOME sets the Java, version 17 or newer.
TEXT
}

say() { printf 'sparklog: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

base_extras=spark,uvloop,demo,certs
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
python=$venv/bin/python

# --- the environment -------------------------------------------------------------------------------------------------

python_fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; }

can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }
# Is this Python built with profile-guided optimisation? Distributions, conda and containers do that; pyenv only on
# request. Without it the same code takes at least half as long again.
is_optimised() {
    "$1" -c 'import sys, sysconfig
told = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
sys.exit(not (told or sys.base_prefix == "/usr"))' 2>/dev/null
}

# Print the suitable Pythons, one per line, newest first.
pythons_in_path() {
    local name candidate
    for name in python3.13 python3.12 python3.11 python3.10 python3 python; do
        while IFS= read -r candidate; do
            if python_fits "$candidate"; then printf '%s\n' "$candidate"; fi
        done < <(type -aP "$name")
    done
}

# Print the first optimised Python, because small requests mostly cost brokers and clients Python time. Otherwise print
# the first that can create environments, otherwise the first.
find_python() {
    local candidate found='' able=''
    if [ -n "${PYTHON:-}" ] && command -v "$PYTHON" >/dev/null 2>&1 && python_fits "$PYTHON"; then
        command -v "$PYTHON"
        return
    fi
    while IFS= read -r candidate; do
        found=${found:-$candidate}
        can_make_venv "$candidate" || continue
        able=${able:-$candidate}
        if is_optimised "$candidate"; then
            [ "$candidate" = "$able" ] || say "using $candidate, because $able is built without optimisations (set PYTHON to choose another)"
            printf '%s\n' "$candidate"
            return
        fi
    done < <(pythons_in_path)
    [ -n "$found" ] ||
        fail "no Python 3.10 to 3.13 found${PYTHON:+ (PYTHON=$PYTHON is not suitable)}: install one, or set PYTHON to its path"
    [ -z "$able" ] || say "$able is built without optimisations: brokers and clients use about 50 % more CPU time"
    printf '%s\n' "${able:-$found}"
}

# Checksum of contents, not times: a checkout, a copy and a deleted file change it; touching a file does not.
sources_sum() {
    (cd "$root" && { find sparklog -type f ! -path '*/__pycache__/*'; ls setup.py pyspark_sparklog.py README.md 2>/dev/null || true; } |
        LC_ALL=C sort | tr '\n' '\0' | xargs -0 cksum | cksum)
}
requirements_sum() { (cd "$root" && cksum setup.cfg pyproject.toml | cksum); }
stamped() { [ -f "$venv/.sparklog-$1" ] && [ "$(<"$venv/.sparklog-$1")" = "$2" ]; }

make_venv() {
    say "creating .venv with $("$1" --version 2>&1)"
    "$1" -m venv --clear "$venv" >/dev/null 2>&1 ||
        fail "$1 cannot create virtual environments: install its venv module (on Debian: apt-get install python3-venv)"
}

# The arguments are passed to pip. Build files go to a scratch directory, because modules that were deleted since an
# earlier build would be installed from build/. The install is not editable, because pyspark finds the data source by
# listing modules, which does not show editable ones.
install_package() {
    local scratch status=0
    scratch=$(mktemp -d)
    printf '[build]\nbuild_base = %s\n[egg_info]\negg_base = %s\n' "$scratch" "$scratch" >"$scratch/setup.cfg"
    DIST_EXTRA_CONFIG=$scratch/setup.cfg PIP_DISABLE_PIP_VERSION_CHECK=1 SPARKLOG_COMPILE=$optimised \
        quietly "$python" -m pip install --no-build-isolation "$@" || status=$?
    rm -rf "$scratch"
    [ $status = 0 ] || fail "pip could not install $root: see the end of its output above, all of it in $venv/install.log"
}

optimised='' # compiler settings of the next install; empty: not compiled

compiled() { [ -e "$venv/.sparklog-compiled" ]; }
install_compiled() {
    command -v cc >/dev/null || fail "no C compiler found (cc): install one (on Debian: apt-get install gcc python3-dev)"
    say "compiling (two minutes)"
    optimised=O2
    install_package --no-deps --force-reinstall "$root"
    optimised=''
    touch "$venv/.sparklog-compiled"
}

# Print the requirements of the given extras in setup.cfg, one per line, except Spark, which .venv always has.
requirements_of() {
    "$python" -c 'import configparser, sys
setup = configparser.ConfigParser()
setup.read(sys.argv[1])
for extra in filter(None, sys.argv[2].split(",")):
    for line in setup["options.extras_require"][extra].strip().split("\n"):
        if line != "sparklog[spark]":
            print(line)' "$root/setup.cfg" "$1"
}

# Only add packages: installed ones keep their version, because a running cluster may import them at any time.
install_extras() {
    local requirement constraints=$venv/.sparklog-constraints requirements=()
    while IFS= read -r requirement; do requirements+=("$requirement"); done < <(requirements_of "$1")
    "$python" -m pip list --disable-pip-version-check --format=freeze --exclude sparklog >"$constraints" 2>/dev/null ||
        fail "pip could not list the packages installed in $venv"
    PIP_DISABLE_PIP_VERSION_CHECK=1 quietly "$python" -m pip install --constraint "$constraints" "${requirements[@]}" ||
        fail "pip could not install $1: see the end of its output above, all of it in $venv/install.log"
}

# Print the ids of processes that run from .venv, such as a cluster, except those that wait for the lock of set_up.
users_of_venv() {
    "$1" -c 'import os, pathlib, sys
found, venv, own = [], os.fsencode(sys.argv[1]), {os.getpid(), os.getppid(), int(sys.argv[2])}
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        words = (entry / "cmdline").read_bytes()
    except OSError:
        continue
    if venv in words and b"fcntl.flock(9" not in words and int(entry.name) not in own:
        found.append(int(entry.name))
print(*sorted(found))' "$venv/" $$
}

quietly() { "$@" >"$venv/install.log" 2>&1 || { tail -n 20 "$venv/install.log" >&2; return 1; }; }

# $1: comma-separated extras. Starts and prints nothing if all of them are installed.
set_up() {
    local extras=$1 requirements sources
    requirements=$(requirements_sum) sources=$(sources_sum)
    if [ -x "$python" ] && stamped "extras-$extras" "$requirements" && stamped sources "$sources" &&
        { [[ ,$extras, != *,compiled,* ]] || compiled; }; then
        return
    fi
    # Two concurrent first runs must not overwrite each other's install. The lock belongs to descriptor 9, so it outlives
    # the Python that takes it (flock(1) is not available everywhere) and is released at the end of this block.
    local found
    if [ -x "$python" ] && python_fits "$python"; then found=$python; else found=$(find_python); fi
    {
        "$found" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
        [ -x "$python" ] && python_fits "$python" || make_venv "$found"
        local users
        users=$(users_of_venv "$found")
        if [[ ,$extras, != *,compiled,* ]] && [ "$extras" != "$base_extras" ] && ! stamped "extras-$extras" "$requirements" &&
            stamped "extras-$base_extras" "$requirements" && [ -f "$venv/.sparklog-sources" ]; then
            say "installing the requirements of sparklog[${extras#"$base_extras",}]"
            install_extras "${extras#"$base_extras",}"
            printf %s "$requirements" >"$venv/.sparklog-extras-$extras"
        fi
        if ! stamped "extras-$extras" "$requirements" || { [[ ,$extras, = *,compiled,* ]] && ! compiled; }; then
            [ -z "$users" ] || fail "$venv must be installed again, but process $users uses it: stop the process first"
            say "installing sparklog[$extras] and its requirements (pyspark has 400 MB: this takes a minute or two)"
            quietly "$python" -m pip install --upgrade 'pip>=24' 'setuptools>=77' || fail "pip could not install setuptools"
            rm -f "$venv/.sparklog-sources" # an interrupted install must not count as complete
            install_package --upgrade "$root[$extras]"
            # Compile only now: the compiler reads types from the installed requirements.
            if [[ ,$extras, = *,compiled,* ]] || compiled; then install_compiled; fi
            printf %s "$requirements" | tee "$venv/.sparklog-extras-$base_extras" >"$venv/.sparklog-extras-$extras"
            printf %s "$sources" >"$venv/.sparklog-sources"
        elif ! stamped sources "$sources" && [ -n "$users" ] && [ -f "$venv/.sparklog-sources" ]; then
            say "keeping the sources installed before, because process $users uses $venv"
        elif ! stamped sources "$sources"; then
            say "installing the changed sources"
            rm -f "$venv/.sparklog-sources"
            # Once compiled, always compile: otherwise sparklog would silently become slow again.
            if compiled; then install_compiled; else install_package --no-deps --force-reinstall "$root"; fi
            printf %s "$sources" >"$venv/.sparklog-sources"
        fi
        # Otherwise every Python process that Spark starts would compile pyspark again. Failure only costs time.
        (cd "$venv" && quietly "$python" -m sparklog.spark.bytecode) || true
    } 9>"$root/.venv.lock"
}

# --- Java ------------------------------------------------------------------------------------------------------------

# Print the major version of the Java in home $1, from its release file, because starting Java takes 0.3 s.
java_major() {
    local version=
    [ -x "$1/bin/java" ] || return 1
    [ -r "$1/release" ] && version=$(sed -n 's/^JAVA_VERSION="\{0,1\}\([0-9]*\).*/\1/p' "$1/release")
    [ -n "$version" ] || version=$("$1/bin/java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
    printf %s "$version"
}

java_home_of_path() {
    local java
    java=$(command -v java) || return 1
    java=$("$python" -c 'import os, sys; print(os.path.realpath(sys.argv[1]))' "$java")
    dirname "$(dirname "$java")"
}

use_java() {
    local home major
    for home in "${JAVA_HOME:-}" "$(java_home_of_path)"; do
        [ -n "$home" ] && major=$(java_major "$home") && [ "${major:-0}" -ge 17 ] || continue
        export JAVA_HOME=$home
        return 0
    done
    return 1
}

find_java() {
    use_java && return
    if [ -f /etc/debian_version ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "no Java 17 or newer found: installing openjdk-17-jre-headless with apt-get"
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install openjdk-17-jre-headless; } >/dev/null 2>&1 || true
        use_java && return
        fail "apt-get could not install openjdk-17-jre-headless: install Java 17 or newer and set JAVA_HOME"
    fi
    fail "no Java 17 or newer found in JAVA_HOME or PATH: install one (for example openjdk-17-jre-headless or temurin-17-jre)"
}

# --- the job ---------------------------------------------------------------------------------------------------------

spark_args=() job_args=() job='' job_known=false master='' deploy_mode=client pack=false delta=false packages=''

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) if $job_known; then job_args+=("$1"); else usage; exit 0; fi ;;
        --setup) $job_known && fail "--setup cannot be combined with a job: ./spark-submit.sh --setup [extra]"
            set_up "$base_extras${2:+,$2}"; exit 0 ;;
        --pack) pack=true ;;
        --delta) delta=true ;;
        --packages) packages=${2:?--packages needs a value}; shift ;;
        --packages=*) packages=${1#*=} ;;
        --) shift; job_known=true; job_args+=("$@"); break ;;
        --deploy-mode) deploy_mode=${2:?--deploy-mode needs a value}; spark_args+=("$1" "$2"); shift ;;
        --deploy-mode=*) deploy_mode=${1#*=}; spark_args+=("$1") ;;
        --master | --conf | -c | --name | --jars | --exclude-packages | --repositories | --py-files | --files | \
            --archives | --properties-file | --driver-memory | --driver-java-options | --driver-library-path | \
            --driver-class-path | --executor-memory | --proxy-user | --driver-cores | --total-executor-cores | \
            --executor-cores | --queue | --num-executors | --principal | --keytab)
            [ $# -ge 2 ] || fail "$1 needs a value"
            [ "$1" != --master ] || master=$2
            spark_args+=("$1" "$2"); shift ;;
        --master=* | --conf=* | --name=* | --jars=* | --exclude-packages=* | --repositories=* | --py-files=* | \
            --files=* | --archives=* | --properties-file=* | --driver-memory=* | --driver-java-options=* | \
            --driver-library-path=* | --driver-class-path=* | --executor-memory=* | --proxy-user=* | --driver-cores=* | \
            --total-executor-cores=* | --executor-cores=* | --queue=* | --num-executors=* | --principal=* | --keytab=*)
            [[ $1 != --master=* ]] || master=${1#*=}
            spark_args+=("$1") ;;
        --supervise | --verbose) spark_args+=("$1") ;;
        -*) job_known=true; job_args+=("$1") ;;
        *) if $job_known; then job_args+=("$1"); else job=$1; job_known=true; fi ;;
    esac
    shift
done

job=${job:-cluster}
script=$root/jobs/$job.py
[ -f "$script" ] || script=$job
if [ "${script%.py}" = "$script" ] || [ ! -f "$script" ]; then
    fail "no job '$job': expected one of $(cd "$root/jobs" && ls ./*.py | sed 's|^\./||; s|\.py$||' | tr '\n' ' ')or the path of a .py file"
fi

[ "$job" != archive ] || delta=true
if $delta; then set_up "$base_extras,delta"; else set_up "$base_extras"; fi
find_java

# The jars of another Spark version fail with this environment's pyspark, with errors that do not name the cause.
if [ -n "${SPARK_HOME:-}" ] && ! ls "$SPARK_HOME"/jars/spark-core_*-4.2.0.jar >/dev/null 2>&1; then
    say "SPARK_HOME=$SPARK_HOME is not Spark 4.2.0: using the Spark in .venv"
    unset SPARK_HOME
fi
if $delta; then
    # These come first: the same settings on the command line come later and win.
    delta_args=()
    while IFS= read -r word; do delta_args+=("$word"); done < <("$python" -m sparklog.delta.session "$packages")
    spark_args=("${delta_args[@]}" ${spark_args[@]+"${spark_args[@]}"})
elif [ -n "$packages" ]; then
    spark_args+=(--packages "$packages")
fi
# A local Spark must not serve other hosts or other users (docs/adr/0024). The jobs in jobs/ configure this themselves,
# because they choose the master.
if [ "$script" != "$root/jobs/$job.py" ] && [[ $master = local || $master = local\[* ]]; then
    export SPARK_LOCAL_IP=${SPARK_LOCAL_IP:-127.0.0.1}
    # Spark asks for no secret on the sockets to its Python workers, so no other user may enter their directory.
    sockets=/tmp/sparklog-$EUID
    mkdir -m 700 "$sockets" 2>/dev/null || true
    [ -d "$sockets" ] && [ ! -L "$sockets" ] && [ -O "$sockets" ] || fail "$sockets must be a directory of your own"
    spark_args=(
        --conf "spark.python.unix.domain.socket.dir=$sockets"
        --conf "spark.driver.host=$SPARK_LOCAL_IP" --conf "spark.driver.bindAddress=$SPARK_LOCAL_IP"
        --conf spark.authenticate=true --conf spark.ui.killEnabled=false "${spark_args[@]}"
    )
fi
export SPARK_CONF_DIR=${SPARK_CONF_DIR:-$root/conf}
export SPARKLOG_CONF_DIR=$root/conf

if $pack; then
    archive=$venv/sparklog-environment.tar.gz
    if [ ! -f "$archive" ] || [ "$venv/.sparklog-sources" -nt "$archive" ]; then
        say "packing .venv into $archive (the executors' hosts need the same Python at $(readlink -f "$python"))"
        # Executors have Spark's jars; the archive provides the rest.
        tar -cf - -C "$venv" --exclude='*/pyspark/jars' --exclude='*/pyspark/examples' --exclude=__pycache__ \
            bin lib pyvenv.cfg | gzip -1 >"$archive.new" || fail "cannot pack $venv"
        mv "$archive.new" "$archive"
    fi
    spark_args+=(--archives "$archive#environment" --conf spark.pyspark.python=./environment/bin/python)
    export PYSPARK_PYTHON=./environment/bin/python
else
    export PYSPARK_PYTHON=${PYSPARK_PYTHON:-$python}
fi

if [ "$deploy_mode" = client ]; then
    # Start Python first, with Spark's JVM as its child: Ctrl-C and SIGTERM then reach the job while Spark still works, so
    # that brokers can be stopped cleanly. Under Spark's own spark-submit the JVM would stop first.
    export PYSPARK_DRIVER_PYTHON=$python
    PYSPARK_SUBMIT_ARGS=$(printf '%q ' ${spark_args[@]+"${spark_args[@]}"})
    [ ${#spark_args[@]} -gt 0 ] || PYSPARK_SUBMIT_ARGS=
    export PYSPARK_SUBMIT_ARGS="${PYSPARK_SUBMIT_ARGS}pyspark-shell"
    exec "$python" "$script" ${job_args[@]+"${job_args[@]}"}
fi
exec "$venv/bin/spark-submit" --files "$root/conf/broker.conf" ${spark_args[@]+"${spark_args[@]}"} \
    "$script" ${job_args[@]+"${job_args[@]}"}
