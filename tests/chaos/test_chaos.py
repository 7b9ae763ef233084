"""A short selection of the chaos: what was acknowledged is not lost, whatever is killed, cut or full."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.__main__ import SEED_VARIABLE
from tests.chaos.disk_errors import CompilerError
from tests.chaos.faults import DiskError
from tests.chaos.replicas.rows import REPLICAS_SHORT, replica_rows
from tests.chaos.run import AnyRow, run
from tests.chaos.scenarios import SHORT, matrix
from tests.conftest import missing
from tests.interop.servers import PeerMissingError, RabbitMQ

SEED: Final = os.environ.get(SEED_VARIABLE) or str(time.time_ns() % 1_000_000)


ROWS: Final[tuple[AnyRow, ...]] = (*SHORT, *REPLICAS_SHORT)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_nothing_acknowledged_is_lost(row: AnyRow, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rabbitmq: RabbitMQ | None = None
    if "rabbitmq" in row.remotes:
        rabbitmq = request.getfixturevalue("rabbitmq")
    try:
        result = run(row, SEED, tmp_path / "run", rabbitmq)
    except (CompilerError, DiskError) as error:
        pytest.skip(str(error))
    except PeerMissingError as error:
        missing(str(error))
        raise
    assert result.sound, str(result)


def test_every_row_has_a_name_of_its_own() -> None:
    rows: list[AnyRow] = [*matrix(), *replica_rows(), *REPLICAS_SHORT]
    assert len({row.name for row in rows}) == len(rows)
    assert len({row.name for row in SHORT}) == len(SHORT)
