"""The example for Airflow: what it starts are commands as they are, in an order. Airflow is not here."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

import pytest
import typer

from gateway.cli import commands

FILE: Final = Path(__file__).resolve().parents[2] / "deploy" / "airflow" / "gateway_pipeline.py"


class Dag:
    """What stands for Airflow's."""

    def __init__(self, name: str, **given: Any) -> None:
        self.name, self.given = name, given

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The tasks are told."""


class Bash:
    """Likewise, for a task."""

    def __init__(self, task_id: str, bash_command: str) -> None:
        self.task_id, self.command = task_id, bash_command
        self.after: list[str] = []

    def __rshift__(self, later: Bash) -> Bash:
        later.after.append(self.task_id)
        return later


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the file defines."""
    sdk, bash = ModuleType("airflow.sdk"), ModuleType("airflow.providers.standard.operators.bash")
    sdk.DAG = Dag  # type: ignore[attr-defined]
    bash.BashOperator = Bash  # type: ignore[attr-defined]
    parts = (
        "airflow",
        "airflow.providers",
        "airflow.providers.standard",
        "airflow.providers.standard.operators",
    )
    for name in parts:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, sdk.__name__, sdk)
    monkeypatch.setitem(sys.modules, bash.__name__, bash)
    return runpy.run_path(str(FILE))


def test_each_task_says_what_its_command_takes(example: dict[str, Any]) -> None:
    tasks: dict[str, Bash] = example["tasks"]
    assert {name: task.after for name, task in tasks.items()} == {
        "archive": [],
        "table": [],
        "rates": ["archive"],
        "reconcile": ["archive"],
    }
    assert example["dag"].given["max_active_runs"] == 1
    for name, task in tasks.items():
        words = shlex.split(task.command.replace("{{ ", "").replace(" | ts }}", ""))
        assert words[:3] == ["gateway", "pipeline", name]
        command: Any = typer.main.get_command(commands())
        for word in words[1:3]:
            command = command.commands[word]
        context = command.make_context(name, words[3:])
        assert str(context.params["summary"]).endswith(f"{name}.prom")
