"""The container image: built from the Dockerfile as it is, and run with its own files and configuration.

No container engine runs on the machines of these tests: `deploy/image.sh` builds with buildah, and the
image's root is then entered with a read-only mount, `chroot` and the image's own user, environment and entry
point.

The build takes some minutes, of a whole core. It runs with `make image`, and under CI=true when a file that
the build depends on has changed within the last day, or the part of it that the image uses; it gives way to
the tests beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.test_package import ROOT
from tests.interop.servers import LOOPBACK, free_ports
from tests.needs import needed

BUILD_SECS_MAX: Final = 3600
START_SECS_MAX: Final = 60
INPUTS: Final = (".dockerignore", "Dockerfile", "deploy/compile.py", "deploy/image.sh")
LOCK: Final = "requirements.lock"
PROJECT: Final = "pyproject.toml"
NOT_LOCKED_FOR_IT: Final = (
    "# The data pipeline"  # what the lock has from here on, no stage of the image installs
)
WANTED: Final = "GATEWAY_TEST_IMAGE"  # set by `make image`

# Mounts the image's root read-only with its volume writable, and runs a program there as the image's user.
ENTER: Final = """
set -e
root=$1 volume=$2 configuration=$3 user=$4
shift 4
mount --rbind "$root" "$root"
mount --bind "$volume" "$root/var/lib/gateway"
mount --bind "$configuration" "$root/etc/gateway"
mount -t tmpfs tmpfs "$root/dev"
mknod -m 666 "$root/dev/null" c 1 3
mknod -m 666 "$root/dev/urandom" c 1 9
mount -o remount,ro,bind "$root"
exec chroot --userspec="$user" "$root" env -i "$@"
"""


class Image:
    """A built image: its configuration, and a mounted copy of its root."""

    def __init__(self, folder: Path, name: str, sizes: list[int], config: dict[str, Any], root: Path) -> None:
        self.folder = folder
        self.name = name
        self.sizes = sizes  # of its layers, in bytes; the first is the base
        self.config = config
        self.root = root

    def start(self, volume: Path, configuration: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start a program within the image, as a container engine would with `--read-only`."""
        return subprocess.Popen(
            (
                "unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh",
                str(self.root), str(volume), str(configuration), self.config["User"],
                *self.config["Env"], *arguments,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def run(self, volume: Path, configuration: Path, *arguments: str) -> tuple[int, str]:
        """Run a program within the image. Return its exit code and its output."""
        process = self.start(volume, configuration, *arguments)
        output, _ = process.communicate(timeout=START_SECS_MAX)
        return process.returncode, output


def is_wanted() -> bool:
    """Return True if the image is to be built: on request, or in CI after a change of its inputs."""
    if os.environ.get(WANTED):
        return True
    if os.environ.get("CI") != "true":
        return False
    if git("log", "-1", "--since=1.day", "--format=%h", "--", *INPUTS).strip():
        return True
    before = git("rev-list", "-1", "--before=1.day", "HEAD").strip()
    return not before or any(
        used(git("show", f"{before}:{path}")) != used((ROOT / path).read_text())
        for path, used in ((LOCK, locked_for_image), (PROJECT, built_by))
    )


def git(*arguments: str) -> str:
    """Return the output of a git command, "" if it fails."""
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False).stdout


def locked_for_image(lock: str) -> str:
    """Return the part of the lock that the image, or the stage that builds it, installs."""
    return lock.partition(NOT_LOCKED_FOR_IT)[0]


def built_by(project: str) -> list[Any]:
    """Return what decides how the package is built: its build system, and its dependencies and commands."""
    found = tomllib.loads(project)
    own = found.get("project", {})
    named = ("dependencies", "requires-python", "scripts")
    return [found.get("build-system"), found.get("tool", {}).get("hatch"), *map(own.get, named)]


def test_only_what_the_image_uses_of_a_file_counts() -> None:
    lock, project = (ROOT / LOCK).read_text(), (ROOT / PROJECT).read_text()
    assert locked_for_image(lock + "other==1\n") == locked_for_image(lock)
    assert locked_for_image(lock.replace("# What compiles it", "other==1\n\n# What compiles it")) != (
        locked_for_image(lock)
    )
    assert built_by(project.replace("[tool.ruff", "[tool.other", 1)) == built_by(project)
    assert built_by(project.replace("dependencies = [", 'dependencies = [\n  "other",', 1)) != built_by(
        project
    )
    assert NOT_LOCKED_FOR_IT in lock


def buildah(folder: Path, *arguments: str) -> str:
    """Return the output of a buildah command on the image store in `folder`."""
    store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"), "--storage-driver", "vfs")
    done = subprocess.run(("buildah", *store, *arguments), capture_output=True, text=True, check=True)
    return done.stdout.strip()


@needed("buildah")
@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if not is_wanted():
        pytest.skip("the image is built by `make image`, and in CI after a change of the Dockerfile")
    lacking = [name for name in ("buildah", "debootstrap", "unshare") if shutil.which(name) is None]
    if lacking or os.geteuid() != 0:
        pytest.skip(f"building the image needs root, buildah and debootstrap; missing: {lacking or 'root'}")
    folder = Path(os.environ.get(WANTED) or tmp_path_factory.mktemp("image"))
    done = subprocess.run(
        ("nice", "-n", "5", ROOT / "deploy/image.sh", folder),
        capture_output=True,
        text=True,
        timeout=BUILD_SECS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    name = done.stdout.split()[-1]
    told = json.loads(buildah(folder, "inspect", "--type", "image", name))
    sizes = [layer["size"] for layer in json.loads(told["Manifest"])["layers"]]
    container = buildah(folder, "from", "--pull-never", name)
    try:
        yield Image(folder, name, sizes, told["Docker"]["config"], Path(buildah(folder, "mount", container)))
    finally:
        buildah(folder, "rm", container)
        if not os.environ.get(WANTED):
            shutil.rmtree(folder)


pytestmark = pytest.mark.timeout(BUILD_SECS_MAX)


def test_a_container_passes_a_message_and_stops_on_sigterm(image: Image, tmp_path: Path) -> None:
    """As the image's own user, on a read-only root."""
    user = int(image.config["User"].partition(":")[0])
    assert user != 0
    volume, configuration = tmp_path / "volume", tmp_path / "configuration"
    volume.mkdir()
    configuration.mkdir()
    os.chown(volume, user, user)
    mqtt, http = free_ports(2)
    stated = {
        "listeners": {"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": mqtt}},
        "http": {"host": LOOPBACK, "port": http},
    }
    (configuration / "gateway.yaml").write_text(yaml.safe_dump(stated))
    assert image.run(volume, configuration, "touch", "/usr/there")[0] != 0, "the root is read-only"
    code, version = image.run(volume, configuration, "gateway", "version")
    assert (code, ", compiled " in version) == (0, True), version

    start = (*image.config["Entrypoint"], *image.config["Cmd"], "--config", "/etc/gateway/gateway.yaml")
    process = image.start(volume, configuration, *start)
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if str(mqtt) in line:
                break
        else:
            pytest.fail("".join(said))
        # The health check of the image is for port 8080; here the port is a free one.
        check = [word.replace(":8080", f":{http}") for word in image.config["Healthcheck"]["Test"]]
        assert check[0] == "CMD"
        assert check != image.config["Healthcheck"]["Test"]
        assert image.run(volume, configuration, *check[1:]) == (0, "")
        url = f"mqtt://{LOOPBACK}:{mqtt}"
        publish = ("gateway", "publish", url, "--topic", "plant/a", "--retain", "--message", "hello")
        subscribe = ("gateway", "subscribe", url, "--topic", "plant/#", "--count", "1")
        assert image.run(volume, configuration, *publish)[0] == 0
        code, received = image.run(volume, configuration, *subscribe)
        assert (code, "hello" in received) == (0, True), received
    finally:
        process.send_signal(getattr(signal, image.config["StopSignal"]))
        rest, _ = process.communicate(timeout=START_SECS_MAX)
    assert process.returncode == 0, rest
    assert list(volume.glob("*.db*")), "the store is in the volume"


def test_the_page_states_the_size_that_the_image_adds_to_its_base(image: Image) -> None:
    page = (ROOT / "docs/guides/docker.md").read_text()
    (stated,) = re.findall(r"adds ([0-9]+) MB", page)
    added = sum(image.sizes[1:]) / 1e6
    assert abs(added - int(stated)) <= 0.1 * added, f"the image adds {added:.0f} MB"


def test_the_name_is_the_one_that_the_manifests_use(image: Image) -> None:
    assert image.name == f"localhost/{deployed_names().pop()}"


def deployed_names() -> set[str]:
    """Return the names of the gateway's image in all manifests and pages."""
    files = [
        *ROOT.glob("deploy/kubernetes/*.yaml"),
        ROOT / "docs/guides/docker.md",
        ROOT / "docs/guides/kubernetes.md",
    ]
    found = {name for file in files for name in re.findall(r"\bgateway:[0-9a-z][0-9a-z.]*", file.read_text())}
    chart = yaml.safe_load((ROOT / "deploy/helm/gateway/Chart.yaml").read_text())
    values = yaml.safe_load((ROOT / "deploy/helm/gateway/values.yaml").read_text())
    return found | {f"{values['image']['repository']}:{values['image']['tag'] or chart['appVersion']}"}


def test_the_image_has_one_name_everywhere() -> None:
    assert len(deployed_names()) == 1
