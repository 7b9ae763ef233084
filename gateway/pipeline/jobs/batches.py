"""Check for Parquet folders with one subfolder `batch=N` per micro-batch.

Spark repeats a micro-batch by overwriting its folder. Such a folder therefore belongs to one checkpoint,
which numbers the micro-batches: with a new checkpoint the first ones would be overwritten.
"""

from __future__ import annotations

from pyarrow import fs

from gateway.errors import PipelineError
from gateway.pipeline.stores import StoreFolder


def check_checkpoint(to: StoreFolder, checkpoint: StoreFolder) -> None:
    """Raise PipelineError if the micro-batches in the folder `to` were written with another checkpoint.

    This is so if `to` contains micro-batches and the folder `checkpoint` contains no offsets.
    """
    if _has(to, "batch=") and not _has(
        StoreFolder(f"{checkpoint.uri}/_checkpoint/offsets", checkpoint.hadoop), ""
    ):
        raise PipelineError(
            f"{to.uri} has what a stream has written whose position is not in {checkpoint.uri}, and it would"
            " be written over: say the --checkpoint of before, or another folder"
        )


def _has(place: StoreFolder, prefix: str) -> bool:
    system, path = place.arrow()
    found = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return any(info.base_name.startswith(prefix) for info in found)
