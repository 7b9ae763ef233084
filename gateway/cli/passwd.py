"""`gateway passwd`: makes the password hash of a user for the configuration."""

from __future__ import annotations

import os
import sys

import typer

from gateway.access.scram import ITERATIONS, ITERATIONS_MAX, SALT_BYTES, make_keys

app = typer.Typer()


@app.command()
def passwd(
    scram: bool = typer.Option(False, "--scram", help="Compute keys for users.NAME.scram instead."),
    iterations: int = typer.Option(
        ITERATIONS,
        min=ITERATIONS,
        max=ITERATIONS_MAX,
        help="Iterations of --scram; more slow down clients as well as attackers.",
    ),
) -> None:
    """Hash a password for users.NAME.password_hash.

    The command prompts for the password, or reads it from standard input.
    """
    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise typer.BadParameter("the password is empty")
    if not scram:
        from gateway.access.users import hash_password

        typer.echo(hash_password(password))
        return
    try:
        typer.echo(make_keys(password, os.urandom(SALT_BYTES), iterations))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
