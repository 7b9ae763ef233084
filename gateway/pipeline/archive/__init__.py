"""The archive: the journal's rows as Parquet by day and route, and a manifest that says which files count.

`manifest.py` is the truth about what is there, `writing.py` what a Spark task writes, `compacting.py` makes
few files of many; `gateway/pipeline/jobs/archive.py` puts them in order. `tables.py` is the same in Delta and
Iceberg, which keep their own files.
"""
