"""Archive of the journal: rows as Parquet files by day and route, and a manifest that lists the valid files.

`manifest.py` decides which files belong to the archive, `writer.py` writes files in Spark tasks, and
`compaction.py` merges small files; `gateway/pipeline/jobs/archive.py` runs these steps. `tables.py` does the
same in Delta Lake and Iceberg, which manage their own files.
"""
