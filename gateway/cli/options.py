"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.settings import CONFIG_VARIABLE, Settings, load_settings

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help=f"Configuration; default: ${CONFIG_VARIABLE}, or none."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def settings_of(config: Path | None) -> Settings:
    """The settings of this process. Raises ConfigurationError."""
    return load_settings(config, os.environ)
