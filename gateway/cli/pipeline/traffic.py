"""Options of the commands that read recorded traffic: journal, archive, time span and mappings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.options import settings_of
from gateway.cli.pipeline.common import journal_of
from gateway.errors import PipelineError

if TYPE_CHECKING:
    from gateway.mapping.loader import Mapping
    from gateway.pipeline.traffic.fates import CandidateMapping

Archive = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder or table of an archive to read; with --journal, also rows that are not archived yet.",
    ),
]
Begin = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="Earliest time of receipt; ISO 8601, UTC.")
]
End = Annotated[
    str | None,
    typer.Option("--until", metavar="TIME", help="Time before which rows were received; ISO 8601, UTC."),
]
Where = Annotated[
    str | None,
    typer.Option(metavar="SQL", help="SQL condition on rows, e.g. \"source_endpoint = 'mqtt'\"."),
]
MappingOption = Annotated[
    list[Path] | None,
    typer.Option("--mapping", help="Mapping file; default: those of the configuration."),
]


def recorded_in(journal: str | None, archive: str | None, config: Path | None) -> str | None:
    """Return the URL or path of the journal to read, or None if only an archive is given.

    Raises ConfigurationError.
    """
    return None if journal is None and archive is not None else journal_of(journal, config)


def check_span(begin: str | None, end: str | None) -> None:
    """Check the times in the options --since and --until; None means that an option is not given.

    Raises BadParameter for an invalid time, and for an empty time span, in which no check could find a fault.
    """
    from gateway.pipeline.times import moment

    try:
        times = [None if text is None else moment(text) for text in (begin, end)]
    except PipelineError as error:
        raise typer.BadParameter(str(error)) from error
    since, until = times
    if since is not None and until is not None and since >= until:
        raise typer.BadParameter(f"--since {begin} must be before --until {end}")


def mappings_of(files: Sequence[Path], config: Path | None) -> list[Mapping]:
    """Load the mapping files `files`, or if there are none, those of the configuration.

    Raises MappingError and ConfigurationError.
    """
    from gateway.mapping.loader import load

    return load(files or settings_of(config).mapping_files())


def candidate_of(mappings: Sequence[Mapping], config: Path | None) -> CandidateMapping:
    """Compile mappings as a candidate mapping, which can route recorded messages.

    `config` defines the endpoints; without it they are not known. Raises MappingError.
    """
    from gateway.pipeline.traffic.fates import CandidateMapping

    settings = settings_of(config) if config is not None else None
    endpoints = {} if settings is None else settings.endpoints()
    texts = {mapping.file: Path(mapping.file).read_text(encoding="utf-8") for mapping in mappings}
    return CandidateMapping(
        mappings, texts, endpoints, domains=None if settings is None else settings.listener_namespaces()
    )
