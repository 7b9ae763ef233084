"""Help, versions and completion are there at once: a command that is named imports its own file and no other,
and what it needs to run only when it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Final

import orjson
import pytest
from typer.core import TyperGroup
from typer.main import get_command

from gateway.cli import FILES, commands
from gateway.cli.exits import Exit
from gateway.cli.pipeline import FILES as PIPELINE
from tests.cli.conftest import Run
from tests.conftest import missing

GATEWAY: Final = Path(sys.executable).with_name("gateway")
SHARED: Final = {
    *("gateway", "gateway.errors", "gateway.access", "gateway.access.scram", "gateway.cli"),
    *(
        f"gateway.cli.{name}"
        for name in ("examples", "exits", "findings", "groups", "operations", "options", "progress")
    ),
    *(f"gateway.cli.{name}" for name in ("messages", "pipeline", "pipeline.common", "pipeline.traffic")),
    *("gateway.cli.tables", "gateway.cli.version", "gateway.operations"),
}
"""What a file of commands may import before anything runs: options, tables, exit codes, some constants."""
OTHERS: Final = {
    *("annotated_doc", "annotated_types", "attr", "markdown_it", "mdurl", "orjson", "pydantic"),
    *("pydantic_core", "pygments", "rich", "shellingham", "typer", "typing_extensions", "typing_inspection"),
}
"""And of others: typer, and what it draws with; pydantic is how it reads arguments."""

# One process after the other would cost a third of a second each: files are forgotten instead.
PROGRAM: Final = """
import sys
before = set(sys.modules)
import gateway.cli, orjson
found = {}
for path in orjson.loads(sys.argv[1]):
    for name in [name for name in sys.modules if name == "gateway" or name.startswith("gateway.")]:
        del sys.modules[name]
    from gateway.cli import main
    sys.argv = ["gateway", *path, "--help"]
    sys.stdout = open("/dev/null", "w")
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, path
    finally:
        sys.stdout.close()
        sys.stdout = sys.__stdout__
    own = [name for name in sys.modules if name.split(".")[0] == "gateway"]
    others = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
    found[" ".join(path)] = [own, sorted(one for one in others if not one.startswith(("gateway", "_")))]
print(orjson.dumps(found).decode())
"""


def paths(files: dict[str, str], group: str) -> dict[str, list[str]]:
    """The command lines below a group, with the file that has each."""
    found: dict[str, list[str]] = {}
    for name, file in files.items():
        found.setdefault(f"{group}{file}", []).append(name)
    return found


def test_help_imports_the_files_of_the_commands_that_it_is_about() -> None:
    lines: list[list[str]] = [[], ["pipeline"], *([name] for name in FILES if name != "pipeline")]
    lines += [["pipeline", name] for name in PIPELINE]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, orjson.dumps(lines)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    for line, (own, others) in orjson.loads(done.stdout).items():
        words = line.split()
        names = set(FILES.values()) if not words else {FILES[words[0]]}
        if words[:1] == ["pipeline"]:
            names |= {f"pipeline.{one}" for one in PIPELINE if words[1:] in ([], [one])}
        assert set(own) - SHARED == {f"gateway.cli.{name}" for name in names} - SHARED, line
        assert set(others) <= OTHERS, line


MEMORY_MAX: Final = 40 * 1_024  # KiB
WEIGHED: Final = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "gateway", *sys.argv[1:]], stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.parametrize(
    "words", ["--help", "run --help", "queues list --help", "pipeline --help", "--version"]
)
def test_help_takes_little_memory(words: str) -> None:
    """At the most, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", WEIGHED, *words.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert 0 < int(done.stdout) < MEMORY_MAX


def test_each_command_is_in_the_file_that_the_table_says() -> None:
    whole = get_command(commands())
    assert isinstance(whole, TyperGroup)
    for group, files in ((whole, FILES), (whole.commands["pipeline"], PIPELINE)):
        assert isinstance(group, TyperGroup)
        assert {name: command.name for name, command in group.commands.items()} == {one: one for one in files}


SHELLS: Final = {
    "bash": """
        source <("$0" completion bash); COMP_WORDS=(gateway {words}); COMP_CWORD={at}
        _gateway_completion "$0"; printf "%s\\n" "${{COMPREPLY[@]}}"
    """,
    "zsh": """
        compdef() {{ }}; _arguments() {{ print -r -- $@ }}; path=("${{0:h}}" $path)
        eval "$($0 completion zsh)"; words=(gateway {words}); CURRENT={at}+1; _gateway_completion
    """,
    "fish": """
        set -p PATH (dirname "$argv[1]"); gateway completion fish | source; complete -C "gateway {words}"
    """,
}


@pytest.mark.parametrize("words, expected", [("que", "queues"), ("check --con", "--connect")])
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_and_options(shell: str, words: str, expected: str) -> None:
    program = which(shell)
    if program is None:
        missing(f"{shell} is not installed")
        return
    script = SHELLS[shell].format(words=words, at=len(words.split()))
    behind = ["--", str(GATEWAY)] if shell == "fish" else [str(GATEWAY)]
    done = subprocess.run([program, "-c", script, *behind], capture_output=True, text=True, timeout=60)
    assert expected in done.stdout, done
    assert "retained" not in done.stdout


def test_a_shell_that_is_not_known_is_a_wrong_argument(run: Run) -> None:
    assert run("completion", "tcsh").code == Exit.USAGE
