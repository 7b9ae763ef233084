"""Stores that the tests start: an S3 server, and a cluster of HDFS in one process."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

from pyarrow import fs

from tests.interop.java import QUICK
from tests.pipeline.cluster import until

HOST: Final = "127.0.0.1"
BUCKET: Final = "plant"
KEY: Final = "key-of-the-tests"


def free_port() -> int:
    """One that nobody listened at a moment ago."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    return port


class Server:
    """A process that listens at a port when it is up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> tuple[str, ...]:
        """What is started, in `folder`."""
        raise NotImplementedError

    def is_up(self) -> bool:
        """Whether it answers."""
        with socket.socket() as there:
            return there.connect_ex((HOST, self.port)) == 0

    def __enter__(self) -> object:
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(self.command(), cwd=self.folder, stdout=log, stderr=log)
        try:
            until(self._came, f"{self.command()[0]} does not start")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _came(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2_000:]
        return self.is_up()

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60)


class S3(Server):
    """moto's, with a bucket."""

    uri = f"s3a://{BUCKET}"

    @property
    def options(self) -> dict[str, str]:
        """Hadoop's, by which it is reached."""
        return {
            "fs.s3a.endpoint": f"http://{HOST}:{self.port}",
            "fs.s3a.endpoint.region": "us-east-1",
            "fs.s3a.path.style.access": "true",
            "fs.s3a.access.key": KEY,
            "fs.s3a.secret.key": KEY,
        }

    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port))

    def __enter__(self) -> S3:
        super().__enter__()
        system = fs.S3FileSystem(
            access_key=KEY,
            secret_key=KEY,
            region="us-east-1",
            endpoint_override=f"http://{HOST}:{self.port}",
            allow_bucket_creation=True,
        )
        system.create_dir(BUCKET)
        return self


class Hdfs(Server):
    """A name node and a data node."""

    def __init__(self, folder: Path, jars: Path) -> None:
        super().__init__(folder)
        self._jars = jars

    @property
    def uri(self) -> str:
        """Of the name node."""
        return f"hdfs://{HOST}:{self.port}"

    def command(self) -> tuple[str, ...]:
        program = "org.apache.hadoop.test.MiniDFSClusterManager"
        given = ("-datanodes", "1", "-nnport", str(self.port), "-format", "-writeDetails", "details")
        return ("java", *QUICK, "-Xmx256m", "-cp", f"{self._jars}/*", program, *given)

    def is_up(self) -> bool:
        """It writes its details when all of it is."""
        return (self.folder / "details").exists()

    def __enter__(self) -> Hdfs:
        super().__enter__()
        return self
