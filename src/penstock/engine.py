"""The Spark engine: the one place that builds the SparkSession and knows its configuration keys.

A process has at most one session. Everything Penstock relies on is fixed here (`_FIXED`); what a
person may tune comes in through `EngineOptions`. The rest of the code sees a `SparkSession` and
never a configuration key.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import enum
import importlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import Unavailable, UserError
from penstock.jvm_lookups import remember_lookups

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

_log = logging.getLogger("penstock.engine")

JAVA_MIN = 17

ARCHIVE_CLASSES = "-XX:ArchiveClassesAtExit"
"""The JVM option that makes a class archive."""

_PARTITIONS_PER_CORE = 4
_FEW_CORES = 4
"""Up to this many cores the serial garbage collector wins."""

_SHORT_YOUNG = "-Xmn128m"
"""Of what a short session makes on few cores nothing grows old: with more room, it is only found
later."""

_PATIENT_COMPILER = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
"""Ten times the JVM's own thresholds. On few cores the optimising compiler takes a third of the CPU
until the first transaction, for code that mostly never runs again; hot code is optimised later."""

_NEXT_IMPORTS = ("pandas", "pyspark.testing.utils", "pyspark.sql.classic.dataframe")
"""The first call into the JVM imports the first two, whatever it is."""

_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
_POOLS = Path(__file__).with_name("fairscheduler.xml")

_FIXED: Mapping[str, str] = {
    # Member names of JSON documents are case-sensitive, and arithmetic never wraps or yields NULL.
    "spark.sql.caseSensitive": "true",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # A later member of a JSON object replaces an earlier one of the same name.
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
    # Documents cross to Python as Arrow, never as pickled rows.
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
}

_DEFAULTS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Noting the line of Python for each column costs three calls to the JVM where there is one.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.scheduler.mode": "FAIR",
    "spark.scheduler.allocation.file": _POOLS.as_uri(),
    # Hundreds of exchange partitions cost more than they spread at the sizes of a transaction.
    "spark.sql.shuffle.partitions": "8",
    # What a task scans it may have to sort: much smaller tasks cost time, larger ones memory.
    "spark.sql.files.maxPartitionBytes": str(32 << 20),
    # An object is read in a moment: counted as more, a few of them would be one task too many.
    "spark.sql.files.openCostInBytes": str(1 << 20),
    # Adaptive execution runs every exchange as a job of its own, and plans again after each: more
    # than it saves a transaction. And partitions are shards, which must stay as they are.
    "spark.sql.adaptive.enabled": "false",
    # What Spark says of its tasks is as it is now, or those that run seem to wait for a slot.
    "spark.ui.liveUpdate.period": "0",
    # A scan names its objects: to look them up takes less than a job with a task for each of them.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000000",
}


class Lifetime(enum.Enum):
    """How long a session is used, which decides where the JVM spends its time and memory."""

    LONG = "until it is stopped: short pauses, and code that is compiled well"
    BATCH = "until the backlog is done: pauses do not matter, so memory counts"
    SHORT = "a minute or less, of which the optimising compiler would take a third for nothing"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to reach Spark. `conf` wins over the defaults, never over what Penstock relies on."""

    master: str = "local[*]"
    conf: Mapping[str, str] = dataclasses.field(default_factory=dict)
    app_name: str = "penstock"
    log_dir: Path | None = None
    """Where the JVM's own log goes; a temporary directory by default."""
    lifetime: Lifetime = Lifetime.LONG


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A way into the JVM of another process, where Spark is running."""

    port: int
    secret: str = dataclasses.field(repr=False)


Lender = Callable[[EngineOptions], Gateway | str]
"""Lets this process use the Spark of another one, or says why it cannot."""

_lender: Lender | None = None
_opening = threading.Lock()


def borrow_from(lender: Lender) -> None:
    """Ask `lender` when Spark is first needed, before starting one."""
    global _lender
    _lender = lender


def open_spark(options: EngineOptions | None = None) -> SparkSession:
    """Build the process's SparkSession, or return the one it already has; active in this thread."""
    options = options or EngineOptions()
    with _opening:  # tasks that need Spark first may be several
        if (running := _running()) is not None:
            return _activate(running)
        found = _lender(options) if _lender is not None else None
        if isinstance(found, Gateway):
            opened = _connect(found, options)
        else:
            if found is not None:
                _log.info("starting Spark for this command alone: %s", found)
            opened = _start(options)
        remember_lookups(opened._jvm)  # noqa: SLF001 - pyspark has no public way into its JVM
        return opened


def _connect(lent: Gateway, options: EngineOptions) -> SparkSession:
    """Use the session of another process; what is set of it stays as it is."""
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    connect: Any = launch_gateway  # it has no types
    where = {"PYSPARK_GATEWAY_PORT": str(lent.port), "PYSPARK_GATEWAY_SECRET": lent.secret}
    with _environment({**where, **_executor_python(options.conf)}):
        gateway = connect()
        jvm = gateway.jvm
        running = jvm.org.apache.spark.SparkContext.getOrCreate()
        context = SparkContext(
            gateway=gateway,
            jsc=jvm.JavaSparkContext(running),
            conf=_lent_conf(running.conf()),
        )
    directory = context._temp_dir  # noqa: SLF001 - the JVM would keep it as long as it lives
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return SparkSession(context)


def _lent_conf(configuration: JavaObject) -> SparkConf:
    from pyspark import SparkConf

    class LentConf(SparkConf):
        """A context goes through all entries for those of executors; each would be three calls."""

        def getAll(self) -> list[tuple[str, str]]:  # noqa: N802 - the name is pyspark's
            prefix = "spark.executorEnv."
            pairs = configuration.getAllWithPrefix(prefix)
            return [(prefix + each._1(), each._2()) for each in pairs]  # noqa: SLF001 - of Scala

    return LentConf(_jconf=configuration)


def _start(options: EngineOptions) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    if clash := sorted(set(options.conf) & set(_FIXED)):
        raise UserError(
            f"{clash[0]} cannot be changed",
            where="--conf",
            why="Penstock's results depend on its value",
            fix="leave it out",
        )
    java = find_java()
    environment = _launch_environment(options.conf, java)
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="penstock-spark-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    log = log_dir / "spark.log"
    settings = {
        "spark.master": options.master,
        "spark.app.name": options.app_name,
        **_DEFAULTS,
        **_parallelism(options),
        **_one_process(options.master),
        **_java_options(options, class_archive(java)),
        **_FIXED,
    }
    try:
        with _environment(environment):
            _launch(settings, log)
            spark = SparkSession.builder.config(map=dict(settings)).getOrCreate()
    except (PySparkException, Py4JError, OSError, RuntimeError) as e:
        raise Unavailable(
            "Spark did not start",
            where=f"master {options.master}",
            why=str(e).splitlines()[0] if str(e) else type(e).__name__,
            fix=f"read {log}; `penstock doctor` checks Java and the machine",
        ) from e
    if options.log_dir is None:  # the session has started: its log is of no use any more
        atexit.register(shutil.rmtree, log_dir, ignore_errors=True)
    if not options.master.startswith("local[") and options.master != "local":
        spark.sparkContext.addPyFile(str(_zip_package(log_dir)))
    return spark


def _running() -> SparkSession | None:
    """The session of the process: the one that is active in this thread, or in another."""
    from pyspark.sql import SparkSession

    # Which is active is known by thread, and a session may have been opened in any of them.
    return SparkSession.getActiveSession() or SparkSession._instantiatedSession  # noqa: SLF001


def _activate(spark: SparkSession) -> SparkSession:
    """Make a session that another thread may have opened the active one of this thread too.

    Spark finds data sources written in Python by way of the active session, and nowhere else.
    """
    jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - pyspark does so for `createDataFrame` only
    jvm.SparkSession.setActiveSession(spark._jsparkSession)  # noqa: SLF001
    return spark


def runs_here(spark: SparkSession) -> bool:
    """True if tasks run on this machine, and see its files."""
    return (spark.sparkContext.master or "").startswith("local")


def exchange_partitions(spark: SparkSession) -> int:
    """The number of partitions that an exchange makes, unless it says otherwise."""
    return int(spark.conf.get("spark.sql.shuffle.partitions") or 1)


def close_spark(*, timeout_s: float = 30) -> None:
    """Stop the process's session, if it has one, and end its JVM."""
    from pyspark import SparkContext

    if (running := _running()) is not None:
        running.stop()
    gateway: Any = SparkContext._gateway  # noqa: SLF001 - pyspark has no public way to end its JVM
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=timeout_s)
        SparkContext._gateway = None  # noqa: SLF001
        SparkContext._jvm = None  # noqa: SLF001


class SparkLost(Unavailable):
    """The JVM of this process is gone, and cannot be replaced within it."""

    exit_code = 5


def spark_is_lost() -> bool:
    """True if the JVM that this process has started has ended, and nobody has closed it."""
    if "pyspark" not in sys.modules:
        return False
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway  # noqa: SLF001 - pyspark has no public way to its JVM
    process = getattr(gateway, "proc", None)
    return process is not None and process.poll() is not None


def peak_rss_bytes() -> int | None:
    """The most memory that the JVM of the process's session had resident; None if not known."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway  # noqa: SLF001 - pyspark has no public way to its JVM
    if gateway is None or getattr(gateway, "proc", None) is None:
        return None
    return peak_rss_of(gateway.proc.pid)


def peak_rss_of(process: int | str) -> int | None:
    """The most memory that a process ("self": this one) had resident; None if not known.

    Not what `getrusage` says: that counts the memory of the parent process, too.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _parallelism(options: EngineOptions) -> dict[str, str]:
    """A few exchange partitions for each core, where they are all here; one for what is short."""
    if (found := re.fullmatch(r"local\[(\d+|\*)(,\d+)?\]", options.master)) is None:
        return {}
    cores = os.cpu_count() or 1 if found[1] == "*" else int(found[1])
    each = 1 if options.lifetime is Lifetime.SHORT else _PARTITIONS_PER_CORE
    return {"spark.sql.shuffle.partitions": str(each * cores)}


def is_one_process(master: str) -> bool:
    """True if the driver and the executor are one process, with this master."""
    return re.fullmatch(r"local(\[[^\]]*\])?", master) is not None


def _one_process(master: str) -> dict[str, str]:
    """Settings for a driver and executors that are one process, if this master makes them so."""
    if not is_one_process(master):
        return {}
    return {
        # Nothing else needs to reach its ports, which other users of the host could use; Spark
        # makes up a secret, and keeps it. A cluster has its own, which only its operator knows.
        "spark.authenticate": "true",
        # This package is sure to be installed, so workers need not import it one by one.
        "spark.python.daemon.module": "penstock.worker_daemon",
        # What tasks answer is handed over, and not sent through a socket to the same process.
        "spark.task.maxDirectResultSize": str(64 << 20),
    }


def _java_options(options: EngineOptions, archive: Path) -> dict[str, str]:
    """The person's configuration, with our settings in front of their JVM options."""
    key = "spark.driver.extraJavaOptions"
    theirs = options.conf.get(key, "")
    ours = [f"-Dlog4j2.configurationFile={_quoted(_LOG_SETTINGS.as_uri())}"]
    short = options.lifetime is Lifetime.SHORT
    few_cores = (os.cpu_count() or 1) <= _FEW_CORES
    if options.lifetime is not Lifetime.LONG and few_cores and "GC" not in theirs:
        ours.append("-XX:+UseSerialGC")  # two collectors would be refused
        if short:
            ours.append(_SHORT_YOUNG)
    if short:
        ours.append("-XX:TieredStopAtLevel=1")
    elif options.lifetime is Lifetime.LONG and few_cores:
        ours += _PATIENT_COMPILER  # a person's own come later, and win
    if archive.exists() and ARCHIVE_CLASSES not in theirs:
        # One that does not fit this Java and these jars is passed over by the JVM.
        ours.append(f"-XX:SharedArchiveFile={_quoted(str(archive))}")
    return {**options.conf, key: " ".join([*ours, *([theirs] if theirs else [])])}


def class_archive(java: Java) -> Path:
    """The archive that has Spark's classes as the JVM wants them, if `penstock prepare` was run.

    Loading and verifying them is half of the time that Spark takes to start and to run a first job.
    It lies in the environment that Penstock is installed in, and goes with it.
    """
    name = f"spark-{metadata.version('pyspark')}-java-{java.version}.jsa"
    return Path(sys.prefix) / "share" / "penstock" / name


def _quoted(text: str) -> str:
    return f'"{text}"' if " " in text else text


def _executor_python(conf: Mapping[str, str]) -> dict[str, str]:
    return {"PYSPARK_PYTHON": conf.get("spark.pyspark.python", sys.executable)}


def _launch_environment(conf: Mapping[str, str], java: Java) -> dict[str, str]:
    """Settings that Spark's launcher and PySpark read from the environment only.

    Executors run this very interpreter: the first `python3` on the path lacks our packages. A
    cluster whose machines keep it elsewhere says so with `spark.pyspark.python`.
    """
    # The launcher is a JVM of its own, which lives for a moment.
    quick = os.environ.get("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    wanted = {**_executor_python(conf), "SPARK_LAUNCHER_OPTS": quick}
    if java.home is not None:
        wanted["JAVA_HOME"] = str(java.home)
    return wanted


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _launch(settings: Mapping[str, str], log: Path) -> None:
    """Start the JVM, with a file as its standard error: terminals stay ours.

    Starting a session in it may take longer, and what is said meanwhile is to be seen.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is None:  # noqa: SLF001 - pyspark has no public way to start its JVM
        threading.Thread(target=_import_ahead, name="penstock-imports", daemon=True).start()
        launch: Any = launch_gateway  # it has no types
        conf = SparkConf().setAll(list(settings.items()))
        with log.open("ab") as file:
            gateway = launch(conf, popen_kwargs={"stderr": file})
        SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001


def _import_ahead() -> None:
    """Import what PySpark needs as soon as the JVM answers, while that starts."""
    with contextlib.suppress(ImportError):  # whoever needs it says so
        for name in _NEXT_IMPORTS:
            importlib.import_module(name)


def _zip_package(directory: Path) -> Path:
    """This package as a zip, for executors on other machines."""
    root = Path(__file__).parent
    target = directory / "penstock.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                archive.write(path, Path("penstock") / path.relative_to(root))
    return target


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java runtime: its major version and the home to give Spark (None: the one on the path)."""

    version: int
    home: Path | None
    executable: Path


def find_java() -> Java:
    """The Java that Spark will run on: `JAVA_HOME`, else `java` on the path, 17 or newer."""
    seen: list[str] = []
    for home, executable in _java_candidates():
        version = _java_version(executable)
        if version is not None and version >= JAVA_MIN:
            return Java(version=version, home=home, executable=executable)
        seen.append(f"{executable} ({'does not run' if version is None else f'version {version}'})")
    raise Unavailable(
        f"no Java {JAVA_MIN} or newer was found",
        why=f"Spark needs one; found {', '.join(seen)}" if seen else "Spark needs one",
        fix="install a Java 17 runtime (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; "
        "macOS: brew install openjdk@17), or set JAVA_HOME to one",
    )


def _java_candidates() -> Iterator[tuple[Path | None, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home), Path(home) / "bin" / "java"
    if on_path := shutil.which("java"):
        yield None, Path(on_path)


def _java_version(executable: Path) -> int | None:
    try:
        answer = subprocess.run(  # noqa: S603 - the path comes from JAVA_HOME or PATH
            [str(executable), "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(found.group(1)) if found else None
