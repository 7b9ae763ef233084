"""The pipeline on a cluster: manifests, the arguments in them, and a job through spark-submit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import typer
import yaml

from gateway.cli import commands
from tests.conftest import missing
from tests.deploy.test_kubernetes import VERSIONS, validate
from tests.pipeline.journals import written

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "deploy" / "spark"
DOCUMENTS: Final = {
    f"{document['kind']}:{document['metadata']['name']}": document
    for document in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_kubernetes_takes_it(name: str, version: str) -> None:
    validate(DOCUMENTS[name], version)


def pod() -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENTS["CronJob:gateway-archive"]["spec"]["jobTemplate"]["spec"]["template"]
    return found


def test_the_job_says_what_the_command_takes() -> None:
    (driver,) = pod()["spec"]["containers"]
    arguments = driver["args"][driver["args"].index("/opt/gateway/submit.py") + 1 :]
    command = typer.main.get_command(commands())
    for name in ("pipeline", arguments[0]):
        command = command.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(arguments[0], list(arguments[1:]))
    assert (context.params["journal"], context.params["to"], context.params["keep_days"]) == (
        "/journal",
        "/archive",
        90,
    )


def test_the_driver_is_found_bounded_and_unprivileged() -> None:
    spec = pod()["spec"]
    (driver,) = spec["containers"]
    service = DOCUMENTS["Service:gateway-pipeline"]["spec"]
    assert (
        f"--conf=spark.driver.host={DOCUMENTS['Service:gateway-pipeline']['metadata']['name']}"
        in driver["args"]
    )
    assert service["selector"].items() <= pod()["metadata"]["labels"].items()
    assert {port["targetPort"] for port in service["ports"]} == {port["name"] for port in driver["ports"]}
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert driver["resources"]["limits"].keys() == {"memory"}
    assert driver["securityContext"]["readOnlyRootFilesystem"] is True
    mounted = {mount["name"] for mount in driver["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_spark_submit_runs_a_job(tmp_path: Path) -> None:
    submit = Path(sys.executable).with_name("spark-submit")
    if not submit.exists() or shutil.which("java") is None:
        missing("spark-submit or java is not installed")
    written(tmp_path / "journal", 30)
    options = ("--master", "local[1]", "--conf", "spark.ui.enabled=false", "--driver-memory", "512m")
    job = ("archive", "--journal", str(tmp_path / "journal"), "--to", str(tmp_path / "archive"))
    done = subprocess.run(
        (str(submit), *options, str(FOLDER / "submit.py"), *job),
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert done.stdout.splitlines()[-1].startswith("30 rows archived in 2 files")
