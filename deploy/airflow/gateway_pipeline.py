"""The gateway's pipeline every hour, for Airflow 3: keep, tabulate, measure, and check what was recorded.

Lay it into Airflow's folder of DAGs. Where its workers run there are the gateway with its extras `pipeline`
and `postgresql`, Java 17, and the journal (here in a store, to which the gateway's machine ships it by
`gateway pipeline ship` from cron); credentials come from the environment of the workers, or from --conf.

Each command ends with code 0 when it did what it was to do and found nothing wrong, with 1 when it failed, or
`reconcile` or `table` found more wrong than their --tolerance, and with 78 when a file of the
configuration is wrong. What each has done is in SUMMARIES, for Prometheus' node exporter.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

JOURNAL = "s3a://plant/journal"
ARCHIVE = "s3a://plant/archive"
SUMMARIES = "/var/lib/gateway-pipeline"
COMMANDS = {
    "archive": f"archive --journal {JOURNAL} --to {ARCHIVE} --format delta --keep-days 90",
    "table": f"table telemetry --mapping /etc/gateway/mapping.yaml --journal {JOURNAL}"
    " --to s3a://plant/telemetry --format delta --event-time sent --tolerance 0.1%",
    "rates": f"rates --archive {ARCHIVE} --since {{{{ data_interval_start | ts }}}}"
    " --until {{ data_interval_end | ts }} --to postgresql://gateway@grafana-db/plant",
    # What leaves an outbox after the interval is looked for up to the archive's end. Without --url what has
    # not left by then waits; with it the journal itself is needed, on the gateway's machine.
    "reconcile": f"reconcile --archive {ARCHIVE} --since {{{{ data_interval_start | ts }}}}"
    " --until {{ data_interval_end | ts }} --tolerance 0.01%",
}
AFTER = {"rates": "archive", "reconcile": "archive"}

with DAG(
    "gateway_pipeline",
    schedule="@hourly",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,  # of an archive, and of a table, one run at a time
    default_args={"retries": 2, "retry_delay": timedelta(minutes=5)},
) as dag:
    tasks = {
        name: BashOperator(
            task_id=name,
            bash_command=f"gateway pipeline {command} --summary {SUMMARIES}/{name}.prom",
        )
        for name, command in COMMANDS.items()
    }
    for later, earlier in AFTER.items():
        tasks[earlier] >> tasks[later]
