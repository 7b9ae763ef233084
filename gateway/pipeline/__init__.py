"""Data pipeline: Spark (PySpark) jobs over the gateway's journal, on a laptop or a cluster.

The package has data sources and a sink for Spark, jobs such as `archive` and `rates`, and archives in
Parquet, Delta Lake and Iceberg. It needs the extra `pipeline` and a Java runtime. Only the commands in
`gateway/cli/pipeline` import it, and it imports no Trio: a running gateway never loads it.
"""
