"""The image, as far as it can be tried without anything that runs containers: its labels, its bill of
materials, and a root that nobody can write to.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import yaml

from gateway import __version__
from tests.conftest import missing
from tests.deploy.test_package import ROOT, pinned
from tests.interop.servers import LOOPBACK, free_ports, mqtt_answers

LINES: Final = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
LABELS: Final = ("title", "description", "licenses", "version", "revision", "created", "base.name")
START_SECS_MAX: Final = 30

# The whole system, read-only, but for the folder that is the volume.
READ_ONLY: Final = """
set -e
mkdir "$1/root"
mount --rbind / "$1/root"
mount -o remount,ro,bind "$1/root"
mount --bind "$2" "$1/root$2"
exec chroot "$1/root" sh -c '
    ! touch "$0/usr/there" 2> "$1/refused" || exit 90
    exec "$2" -m gateway run --config "$1/gateway.yaml"' "" "$2" "$3"
"""


def test_it_has_the_labels_of_the_oci() -> None:
    (label,) = [line for line in LINES if line.startswith("LABEL ")]
    assert set(re.findall(r"org\.opencontainers\.image\.([a-z.]+)=", label)) == set(LABELS)
    assert f"ARG VERSION={__version__}" in LINES
    (base,) = {line.split()[1] for line in LINES if line.startswith("FROM ")}
    assert base == "${BASE}"
    assert any(line.startswith("ARG BASE=python:") for line in LINES)
    assert 'base.name="docker.io/library/$BASE"' in label


def test_the_bill_of_materials_names_everything_that_is_installed(tmp_path: Path) -> None:
    """As the image has it made, of the environment of these tests."""
    (made,) = [line for line in LINES if "cyclonedx-py" in line]
    words = shlex.split(made.partition("cyclonedx-py")[2])
    words[-1], words[words.index("-o") + 1] = sys.executable, str(tmp_path / "sbom.json")
    program = Path(sys.executable).with_name("cyclonedx-py")
    subprocess.run([program, *words], check=True, capture_output=True, timeout=120)
    told = json.loads((tmp_path / "sbom.json").read_text())
    assert told["bomFormat"] == "CycloneDX"
    found = {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in told["components"]}
    assert pinned("The gateway").items() <= found.items()
    assert found["gateway"] == __version__


def test_a_root_that_is_read_only_is_enough(tmp_path: Path) -> None:
    """The gateway serves, and stores, where nothing but its volume can be written."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run((unshare, "-rm", "true"), capture_output=True).returncode:
        missing("unshare: namespaces of users and mounts")
        return
    data, place = tmp_path / "data", tmp_path / "place"
    data.mkdir()
    place.mkdir()
    mqtt, http = free_ports(2)
    listeners = {"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": mqtt}}
    stated = {
        "listeners": listeners,
        "http": {"host": LOOPBACK, "port": http},
        "store": {"path": str(data / "store")},
        "journal": {"enabled": True},
    }
    (data / "gateway.yaml").write_text(yaml.safe_dump(stated))
    process = subprocess.Popen(
        (unshare, "-rm", "sh", "-c", READ_ONLY, "sh", place, data, sys.executable),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:  # it says where to connect when every listener is open
            said.append(line)
            if str(mqtt) in line:
                break
        assert mqtt_answers(mqtt), "".join(said)
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=START_SECS_MAX)
    assert process.returncode == 0, rest
    assert "Read-only file system" in (data / "refused").read_text(), "it was"
    assert list((data / "store").glob("*.db*")), "and it has stored"


def test_traces_are_in_it() -> None:
    """What runs is all of the lock in front of what builds it, so also the extra `otel`."""
    lock = (ROOT / "requirements.lock").read_text()
    assert any("sed '/^# What builds it/,$d' requirements.lock > running" in line for line in LINES)
    assert any("--require-hashes -r running" in line for line in LINES)
    assert 0 < lock.index("\n# Traces") < lock.index("\n# What builds it")
    assert "opentelemetry-sdk" in pinned("Traces")
