"""Folders by their Spark names: paths, `file:`, `s3a:`, `gs:`, `abfs:` and `hdfs:`.

Spark's JVM accesses a store with Hadoop's classes. Python, in planners, tasks and the driver, uses Arrow's
file systems, which need no JVM. Both use the same options: a session's `spark.hadoop.` options (`hadoop_of`),
with endpoint, region and credentials, are part of a StoreFolder. Arrow fails within seconds when a store is
unreachable, so it is used to check stores before a job starts. The journal's reader needs paths; StoredPath
is one for a store. Its files are read ahead, since a request takes as long as the transfer of a mebibyte.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from io import SEEK_END, SEEK_SET
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast
from uuid import uuid4

from pyarrow import fs

from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECT_SECS: Final = 3.0
REQUEST_SECS: Final = 20.0
ATTEMPTS: Final = 3
ERROR_CHARACTERS_MAX: Final = 300  # Characters of a store's error message.
AHEAD_BYTES: Final = 8 * 1_048_576  # Bytes of one request; a task holds one such piece.
SECRETS: Final = ("fs.s3a.access.key", "fs.s3a.secret.key", "fs.s3a.session.token")
"""Options that Hadoop may store in a credential provider."""

URI: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?://([^/]*))?(?=/|$)(.*)")
OF_A_JOB: Final = re.compile(r"[.]?(?:part-|_SUCCESS|_temporary)")
"""Beginnings of the names of files that Spark writes into a folder."""

PREFIXES: Final = ("fs.s3a.", "fs.gs.", "fs.azure.")
JARS: Final = {
    "s3a": "org.apache.hadoop:hadoop-aws:{hadoop}",
    "gs": "com.google.cloud.bigdataoss:gcs-connector (its jar with dependencies)",
    "abfs": "org.apache.hadoop:hadoop-azure:{hadoop}",
    "abfss": "org.apache.hadoop:hadoop-azure:{hadoop}",
}
"""Package with which Spark itself reads a scheme."""

CONDITIONAL: Final = "fs.option.create.conditional.overwrite"
EXISTS: Final = ("RemoteFileChangedException", "FileAlreadyExistsException")
UNKNOWN_REQUEST: Final = "Status Code: 501"

Hadoop = Mapping[str, str]


class ArrowPath(NamedTuple):
    """Arrow file system, and the path of a folder on it."""

    system: Arrow
    path: str


@dataclass(frozen=True)
class StoreFolder:
    """Folder on this machine or in a store: the folder's path or URI, and Hadoop options for the store."""

    uri: str
    hadoop: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # Contains secrets.

    @property
    def scheme(self) -> str:
        """Scheme of the folder's URI; `file` for a path."""
        return _split(self.uri)[0] if is_uri(self.uri) else "file"

    @property
    def is_local(self) -> bool:
        """True if the folder is a path on this machine."""
        return self.scheme == "file"

    def arrow(self) -> ArrowPath:
        """Return the Arrow file system of the folder's store, and the path of the folder on it.

        Raises PipelineError for an unknown scheme, and for missing options.
        """
        return _arrow_path(self)

    def path(self) -> Path:
        """Return the folder as a Path, or as a StoredPath, with the same methods, if it is in a store."""
        if self.is_local:
            return Path(self.uri)
        return cast("Path", StoredPath(self, self.arrow().path))

    def check_reachable(self) -> StoreFolder:
        """Check that the folder's store is reachable, and return this object.

        The folder need not exist. Raises PipelineError if the store is unreachable.
        """
        system, path = self.arrow()
        try:
            system.get_file_info(path)
        except OSError as error:
            raise PipelineError(f"{self.uri} is unreachable: {_error_summary(error)}") from error
        return self


def place_of(uri: str, hadoop: Hadoop | None = None) -> StoreFolder:
    """Return the folder with the path or URI `uri`; a relative path becomes absolute.

    `hadoop` has the options for the store. Raises PipelineError for an incomplete URI, and for one with a
    password.
    """
    if not is_uri(uri):
        if (scheme := uri.partition(":")[0]) in _SYSTEMS and scheme != uri:
            raise PipelineError(f"{uri} is no URI: {scheme}://{uri[len(scheme) + 1 :]}? A folder is ./{uri}")
        return StoreFolder(str(Path(uri).absolute()))
    scheme, host, path = _split(uri)
    if scheme == "file":
        return StoreFolder(path)
    user, _, bucket = host.rpartition("@")
    if ":" in user:  # abfss://container@account has none
        raise PipelineError(
            f"{scheme}://…@{bucket}{path} has a user and a password; give them by Hadoop's options or the"
            " environment"
        )
    return StoreFolder(f"{scheme}://{host}{path}".rstrip("/"), tuple(sorted((hadoop or {}).items())))


def check_unoccupied(place: StoreFolder) -> StoreFolder:
    """Check that a Spark job may write to the folder `place`, and return `place`.

    Raises PipelineError if the folder has files that no Spark job has written, because the job would delete
    them.
    """
    system, path = place.check_reachable().arrow()
    kind = system.get_file_info(path).type
    if kind == fs.FileType.File:
        raise PipelineError(f"{place.uri} is a file, not a folder; give another name")
    if kind == fs.FileType.Directory:
        names = [info.base_name for info in system.get_file_info(fs.FileSelector(path))]
        others = sorted(name for name in names if name and not OF_A_JOB.match(name))
        if others:
            raise PipelineError(
                f"{place.uri} has {others[0]} in it, which the job would delete; give another folder"
            )
    return place


def is_uri(text: str) -> bool:
    """Return True if `text` is a URI with a scheme, and False if it is a path.

    The host may be omitted, as in Hadoop: `hdfs:/data`.
    """
    return URI.match(text) is not None


def _split(uri: str) -> tuple[str, str, str]:
    """Split a URI into scheme, host and path. As in Spark, `?` and `#` are ordinary characters."""
    found = URI.match(uri)
    assert found is not None
    return found[1], found[2] or "", found[3]


def hadoop_in(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options for Hadoop among Spark's options, without their prefix `spark.hadoop.`."""
    prefix = "spark.hadoop."
    return {key.removeprefix(prefix): value for key, value in options.items() if key.startswith(prefix)}


def hadoop_of(spark: SparkSession) -> Hadoop:
    """Return the session's Hadoop options for stores, including those from the cluster's configuration.

    The result is empty for Spark Connect, whose workers use their own options.
    """
    configuration = _configuration(spark)
    if configuration is None:
        return {}
    found: dict[str, str] = {}
    for prefix in PREFIXES:
        for name, value in dict(configuration.getPropsWithPrefix(prefix)).items():
            found[f"{prefix}{name}"] = value
    for name in SECRETS:
        secret = configuration.getPassword(name)
        if secret is not None:
            found[name] = "".join(secret)
    return found


def _configuration(spark: SparkSession) -> Any:
    """Return Hadoop's configuration with the session's options; None for Spark Connect."""
    session: Any = getattr(spark, "_jsparkSession", None)
    return None if session is None else session.sessionState().newHadoopConf()


def put_once(place: StoreFolder, below: str, data: bytes) -> bool:
    """Create the file `below` with the content `data` in the folder `place` on S3, if it does not exist.

    Return True if the file was created. Return False if this is impossible: Arrow has no such request, so
    Spark's Hadoop classes are needed, and the store must support the request. Raises FileExistsError if the
    file exists with other content, and OSError.
    """
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    context: Any = SparkContext._active_spark_context
    if place.scheme != "s3a" or context is None:
        return False
    jvm = context._jvm
    configuration = jvm.org.apache.hadoop.conf.Configuration(context._jsc.hadoopConfiguration())
    for name, value in place.hadoop:
        configuration.set(name, value)
    path = jvm.org.apache.hadoop.fs.Path(f"{place.uri}/{below}")
    try:
        system = path.getFileSystem(configuration)
    except Py4JError:
        return False
    try:
        builder = system.createFile(path).overwrite(False).recursive()
        stream = builder.opt(CONDITIONAL, "true").build()
        stream.write(bytearray(data))
        stream.close()
    except Py4JError as error:
        if UNKNOWN_REQUEST in str(error):
            return False
        if not any(one in str(error) for one in EXISTS):
            raise OSError(f"{place.uri}/{below} cannot be created: {_error_summary(error)}") from error
        if _content(place, below) != data:  # Otherwise a request was repeated that had succeeded.
            raise FileExistsError(f"{place.uri}/{below}") from error
    return True


def _content(place: StoreFolder, below: str) -> bytes | None:
    """Return the content of a small file in the folder `place`, or None if the file does not exist.

    `below` is the path of the file below the folder.
    """
    system, root = place.arrow()
    try:
        with system.open_input_stream(f"{root}/{below}") as stream:
            content: bytes = stream.read()
    except FileNotFoundError:
        return None
    return content


def spark_reaches(spark: SparkSession, place: StoreFolder) -> str:
    """Check that Spark can use the folder `place`. Return its name for Spark's readers and writers.

    Raises PipelineError if the store is unreachable, or if Spark lacks the classes for the store. Spark
    itself reports that with a traceback, sometimes after minutes.
    """
    if place.is_local:
        return f"file://{place.uri}"
    place.check_reachable()
    jvm: Any = spark.sparkContext._jvm
    try:
        jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(place.scheme, _configuration(spark))
    except Exception as error:  # py4j raises Java's exceptions.
        if place.scheme == "s3":
            raise PipelineError(f"Spark's scheme for it is s3a://: write s3a{place.uri[2:]}") from error
        package = JARS.get(place.scheme, f"the classes of Hadoop for {place.scheme}://")
        version = jvm.org.apache.hadoop.util.VersionInfo.getVersion()
        raise PipelineError(
            f"Spark cannot read {place.scheme}:// here: it needs"
            f" --conf spark.jars.packages={package.format(hadoop=version)}"
        ) from error
    return place.uri


def spark_writes(spark: SparkSession, place: StoreFolder) -> str:
    """Check that Spark's tasks can write to the folder `place`. Return its name for Spark's writers.

    Raises PipelineError if the store is unreachable, if Spark lacks the classes for it, or if tasks would
    write to the disks of their own machines, where the driver does not find the files.
    """
    name = spark_reaches(spark, place)
    context: Any = getattr(spark, "_sc", None)  # A session of Spark Connect has none, and shares no disk.
    if place.is_local and context is not None and context.master.partition("[")[0] != "local":
        folder = Path(place.uri)
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".{uuid4().hex}.seen"
        mark.touch()
        try:
            _check_visible_to_tasks(context, place, str(mark))
        finally:
            mark.unlink()
            with suppress(OSError):  # The folder is not empty.
                folder.rmdir()
    return name


def _check_visible_to_tasks(context: Any, place: StoreFolder, mark: str) -> None:
    """Raise PipelineError if a Spark task cannot see the file `mark`, which the driver has written.

    `context` is the SparkContext, and `place` the folder of the file, for the error.
    """
    tasks = 2 * context.defaultParallelism
    blind = context.parallelize(range(tasks), tasks).map(lambda _: _host_without_file(mark)).collect()
    hosts = sorted({host for host in blind if host is not None})
    if hosts:
        raise folder_mismatch(place, f"{', '.join(hosts)} {'has' if len(hosts) == 1 else 'have'} another")


def _host_without_file(mark: str) -> str | None:
    """Return this machine's host name if the file `mark` cannot be seen from it, otherwise None."""
    return None if Path(mark).exists() else socket.gethostname()


def folder_mismatch(place: StoreFolder, why: str) -> PipelineError:
    """Return the error for a folder that driver and tasks do not share; `why` is the reason."""
    return PipelineError(
        f"{place.uri} is not the same folder on the driver and on all executors: {why}; give one that all of"
        " them have mounted, or one in a store, as s3a://bucket/path"
    )


@lru_cache(maxsize=64)
def _arrow_path(place: StoreFolder) -> ArrowPath:
    if place.is_local:
        return ArrowPath(fs.LocalFileSystem(), place.uri)
    scheme, host, path = _split(place.uri)
    below = f"{host.rpartition('@')[0] or host}{path}".rstrip("/")
    make = _SYSTEMS.get(scheme)
    if make is None:
        raise PipelineError(
            f"{place.uri}: folders are paths, or begin with {', '.join(f'{one}://' for one in _SYSTEMS)}"
        )
    if scheme == "hdfs":
        below = path.rstrip("/") or "/"
    try:
        return ArrowPath(make(dict(place.hadoop), host), below)
    except (OSError, ValueError) as error:
        raise PipelineError(f"{place.uri} is unreachable: {_error_summary(error)}") from error


class S3Options(NamedTuple):
    """Endpoint and credentials of an S3 bucket. A value is None if the options do not contain it.

    `endpoint` is a URL. `has_path_style` is True if the bucket's name is part of the URL's path, and False if
    it is part of the host; None leaves it to the client library.
    """

    access_key: str | None
    secret_key: str | None
    session_token: str | None
    region: str | None
    role: str | None
    endpoint: str | None
    is_anonymous: bool
    has_path_style: bool | None


def s3_options(place: StoreFolder) -> S3Options:
    """Return the endpoint and credentials for the S3 bucket of the folder `place`."""
    return _s3_options(dict(place.hadoop), _split(place.uri)[1])


def _s3_options(hadoop: Hadoop, bucket: str) -> S3Options:
    def option(name: str) -> str | None:
        found = hadoop.get(f"fs.s3a.bucket.{bucket}.{name}") or hadoop.get(f"fs.s3a.{name}")
        return found or None

    endpoint, style = option("endpoint"), option("path.style.access")
    if endpoint is not None:
        scheme, _, host = endpoint.rpartition("://")
        scheme = scheme or ("https" if option("connection.ssl.enabled") != "false" else "http")
        endpoint = f"{scheme}://{host.rstrip('/')}"
    return S3Options(
        option("access.key"),
        option("secret.key"),
        option("session.token"),
        option("endpoint.region"),
        option("assumed.role.arn"),
        endpoint,
        "AnonymousAWSCredentialsProvider" in (option("aws.credentials.provider") or ""),
        None if style is None else style != "false",
    )


def _s3(hadoop: Hadoop, bucket: str) -> Arrow:
    """Return Arrow's file system for an S3 bucket, with the endpoint and credentials in the options."""
    options = _s3_options(hadoop, bucket)
    arguments: dict[str, Any] = {
        "access_key": options.access_key,
        "secret_key": options.secret_key,
        "session_token": options.session_token,
        "region": options.region,
        "role_arn": options.role,
        "anonymous": options.is_anonymous,
        "connect_timeout": CONNECT_SECS,
        "request_timeout": REQUEST_SECS,
        "retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    }
    if options.role is not None:
        arguments["access_key"] = arguments["secret_key"] = arguments["session_token"] = None
    if options.endpoint is not None:
        scheme, _, host = options.endpoint.partition("://")
        arguments["endpoint_override"] = host
        arguments["scheme"] = scheme
        arguments["force_virtual_addressing"] = options.has_path_style is False
    return fs.S3FileSystem(**arguments)


def _gs(hadoop: Hadoop, bucket: str) -> Arrow:
    """Return Arrow's file system for a Google Cloud Storage bucket, with the credentials in the options."""
    from datetime import timedelta

    del bucket
    keyfile = hadoop.get("fs.gs.auth.service.account.json.keyfile")
    if keyfile:
        os.environ.setdefault("GOOGLE_APPLICATION_CREDENTIALS", keyfile)
    scheme, _, host = hadoop.get("fs.gs.storage.root.url", "").rpartition("://")
    return fs.GcsFileSystem(
        anonymous=hadoop.get("fs.gs.auth.type") == "UNAUTHENTICATED",
        endpoint_override=host.rstrip("/") or None,
        scheme=scheme or None,
        retry_time_limit=timedelta(seconds=CONNECT_SECS * ATTEMPTS),
    )


def _abfs(hadoop: Hadoop, netloc: str) -> Arrow:
    """Return Arrow's file system for Azure; `netloc` is `container@account.dfs.core.windows.net`."""
    host = netloc.rpartition("@")[2]
    account = host.partition(".")[0]

    def option(name: str) -> str | None:
        return hadoop.get(f"fs.azure.{name}.{host}") or hadoop.get(f"fs.azure.{name}") or None

    endpoint = option("account.oauth2.client.endpoint") or ""
    tenant = re.search(r"/([^/]+)/oauth2/", endpoint)
    if endpoint:
        os.environ.setdefault("AZURE_AUTHORITY_HOST", "{0}//{2}".format(*endpoint.split("/")))
    authority = host.removeprefix(account)  # Other clouds have other authorities.
    return fs.AzureFileSystem(
        account_name=account,
        dfs_storage_authority=authority or None,
        blob_storage_authority=re.sub("^[.]dfs[.]", ".blob.", authority) or None,
        account_key=option("account.key"),
        sas_token=option("sas.fixed.token"),
        client_id=option("account.oauth2.client.id"),
        client_secret=option("account.oauth2.client.secret"),
        tenant_id=None if tenant is None else tenant[1],
    )


def _hdfs(hadoop: Hadoop, netloc: str) -> Arrow:
    """Return Arrow's file system for HDFS, which uses HDFS's own protocol; `netloc` is its host and port.

    Name services, users and Kerberos are configured in $HADOOP_CONF_DIR.
    """
    del hadoop
    try:
        from hdfs_native.fsspec import HdfsFileSystem
    except ImportError as error:
        raise PipelineError("hdfs:// needs hdfs-native: pip install 'gateway[hdfs]'") from error
    host, _, port = netloc.partition(":")
    if port:  # Without a port it is a name service. The library would retry an unreachable host for minutes.
        socket.create_connection((host, int(port)), CONNECT_SECS).close()
    found = HdfsFileSystem(host or None, int(port) if port else None)
    return fs.PyFileSystem(fs.FSSpecHandler(found))


_SYSTEMS: Final = {"s3a": _s3, "s3": _s3, "gs": _gs, "abfs": _abfs, "abfss": _abfs, "hdfs": _hdfs}


def _error_summary(error: BaseException) -> str:
    """Return a store's error message as one line.

    Messages of Google's library have several lines, one for each attempt.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    summary = lines[0] if lines else type(error).__name__
    return summary if len(summary) <= ERROR_CHARACTERS_MAX else f"{summary[:ERROR_CHARACTERS_MAX]} …"


class StoredPath:
    """Path in a store, with those methods of `pathlib.Path` that the journal's reader uses."""

    def __init__(self, place: StoreFolder, path: str, info: Arrow | None = None) -> None:
        self._place = place
        self._path = path
        self._info = info

    def __str__(self) -> str:
        below = self._path.removeprefix(self._place.arrow().path)
        return f"{self._place.uri}{below}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(self._path)

    def __lt__(self, other: StoredPath) -> bool:
        return self._path < other._path

    def __truediv__(self, below: str) -> StoredPath:
        return StoredPath(self._place, f"{self._path}/{below}")

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredPath, (self._place, self._path)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self._path.rpartition("/")[2]

    def is_dir(self) -> bool:
        """Return True if the path is a folder. Raises PipelineError if the store is unreachable."""
        return bool(self._file_info().type == fs.FileType.Directory)

    def iterdir(self) -> Iterator[StoredPath]:
        """Yield the files and folders in this folder."""
        system = self._place.arrow().system
        for info in system.get_file_info(fs.FileSelector(self._path)):
            yield StoredPath(self._place, info.path, info)

    def stat(self) -> os.stat_result:
        """Return the size and modification time of the file.

        The modification time is also given as inode number, so that a replaced file is detected. Raises
        FileNotFoundError if there is no such file.
        """
        info = self._file_info()
        if info.type != fs.FileType.File:
            raise FileNotFoundError(str(self))
        changed = info.mtime_ns or 0
        times = (changed // 1_000_000_000,) * 3
        return os.stat_result((0, changed, 0, 1, 0, 0, info.size or 0, *times))

    def open(self, mode: str = "rb", buffering: int = 0) -> StoredFile:
        """Open the file for reading."""
        del mode, buffering  # The reader passes them for files on disks.
        return StoredFile(self.arrow_file())

    def arrow_file(self) -> Arrow:
        """Open the file as an Arrow file. Raises FileNotFoundError if there is no such file."""
        return self._place.arrow().system.open_input_file(self._path)

    def _file_info(self) -> Arrow:
        if self._info is None:
            try:
                self._info = self._place.arrow().system.get_file_info(self._path)
            except OSError as error:
                raise PipelineError(f"{self._place.uri} is unreachable: {_error_summary(error)}") from error
        return self._info


class StoredFile:
    """Open file in a store, with a read-ahead buffer."""

    def __init__(self, source: Arrow) -> None:
        self._source = source
        self._size = int(source.size())
        self._at = 0
        self._begin = 0
        self._ahead = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.close()

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Set the position, relative to the beginning or the end of the file. Return the new position."""
        self._at = offset + (self._size if whence == SEEK_END else 0)
        return self._at

    def read(self, count: int) -> bytes:
        """Return `count` bytes from the current position; fewer only at the end of the file."""
        count = min(count, self._size - self._at)
        if count <= 0:
            return b""
        first = self._at - self._begin
        if first < 0 or first + count > len(self._ahead):
            self._begin, first = self._at, 0
            self._ahead = self._source.read_at(min(max(count, AHEAD_BYTES), self._size - self._at), self._at)
        self._at += count
        return self._ahead[first : first + count]
