"""`gateway passwd`: make the hash that the configuration wants of a user."""

from __future__ import annotations

import sys

import typer
from argon2 import PasswordHasher

app = typer.Typer()


@app.command()
def passwd() -> None:
    """Hash a password for users.NAME.password_hash; it is asked for, or read from standard input."""
    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise typer.BadParameter("the password is empty")
    typer.echo(PasswordHasher().hash(password))
