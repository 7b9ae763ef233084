"""DAG for Airflow 3 that archives, tabulates, measures and checks the recorded messages every hour.

Copy this file into Airflow's folder of DAGs. Airflow's workers need the gateway with its extras `pipeline`
and `postgresql`, Java 17, and access to the journal (here in a store, to which the gateway's machine copies
it by `gateway pipeline ship` from cron). Credentials are in the environment of the workers, or in --conf.

A command ends with exit code 0 if it succeeded and found no fault, with 1 if it failed, or if `reconcile` or
`table` found more faults than their --tolerance permits, and with 78 if a configuration file is invalid. Its
summary is in SUMMARIES, for Prometheus' node exporter.
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
    # Messages that leave an outbox after the interval are searched up to the archive's end. Without --url,
    # those that have not left by then count as waiting. With --url, the journal itself is needed.
    "reconcile": f"reconcile --archive {ARCHIVE} --since {{{{ data_interval_start | ts }}}}"
    " --until {{ data_interval_end | ts }} --tolerance 0.01%",
}
AFTER = {"rates": "archive", "reconcile": "archive"}

with DAG(
    "gateway_pipeline",
    schedule="@hourly",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,  # only one run at a time may write to an archive or a table
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
