"""`gateway completion`: prints a script by which a shell completes commands, options and their values."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from gateway.cli.groups import COMPLETE

app = typer.Typer()


@app.command()
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Name of the shell.")],
) -> None:
    """Print a script that completes commands and options in a shell.

    bash: `source <(gateway completion bash)` in ~/.bashrc; zsh: the same, in ~/.zshrc behind `compinit`;
    fish: `gateway completion fish > ~/.config/fish/completions/gateway.fish`.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # by no other name

    typer.echo(get_completion_script(prog_name="gateway", complete_var=COMPLETE, shell=shell))
