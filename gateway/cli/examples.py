"""Examples of each command, which its help and the reference show below its options."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "access explain": (
        "gateway access explain ann publish mqtt plant/l1/temp",
        "gateway access explain ann connect amqp091 /",
    ),
    "bench": ("gateway bench mqtt://localhost --topic load --receive --count 50000",),
    "check": ("gateway check --config gateway.yaml --connect", "gateway check --strict --json"),
    "clients disconnect": ("gateway clients disconnect --client press-7",),
    "clients list": (
        "gateway clients list --user ann",
        "gateway clients list --sort bytes_in --limit 10",
    ),
    "completion": ("gateway completion bash",),
    "deadletters list": ("gateway deadletters list --route telemetry --limit 20",),
    "deadletters purge": ("gateway deadletters purge --route telemetry",),
    "deadletters redrive": (
        "gateway deadletters redrive --route telemetry",
        "gateway deadletters redrive 17 18",
    ),
    "deadletters show": ("gateway deadletters show 17",),
    "explain": (
        "gateway explain mqtt --topic plant/l1/temp --body '{\"value\": 21.5}'",
        "gateway explain amqp091 --exchange telemetry --routing-key l1.temp",
    ),
    "import mosquitto": ("gateway import mosquitto /etc/mosquitto/mosquitto.conf --to gateway",),
    "import rabbitmq": ("gateway import rabbitmq definitions.json --to gateway",),
    "journal export": (
        "gateway journal export --parquet today.parquet --since 2026-11-27T00:00:00Z --route telemetry",
    ),
    "journal lake": (
        "gateway journal lake --to /data/lake/messages",
        "gateway journal lake --journal /var/lib/gateway/journal --to /data/lake/messages --follow",
    ),
    "journal stat": ("gateway journal stat --config gateway.yaml",),
    "journal tail": ("gateway journal tail --follow --route telemetry",),
    "journal verify": ("gateway journal verify --journal /var/lib/gateway/journal",),
    "links list": ("gateway links list", "gateway links list --json"),
    "links pause": ("gateway links pause erp",),
    "links resume": ("gateway links resume erp",),
    "passwd": ("gateway passwd", "gateway passwd --scram"),
    "pipeline archive": ("gateway pipeline archive --to /archive --keep-days 90",),
    "pipeline backtest": ("gateway pipeline backtest candidate.yaml --since 2026-11-27T00:00:00",),
    "pipeline bundle": ("gateway pipeline bundle --to bundle --environment",),
    "pipeline check": ("gateway pipeline check",),
    "pipeline lineage": ("gateway pipeline lineage --archive /archive",),
    "pipeline rates": ("gateway pipeline rates --window '1 minute' --report rates.html",),
    "pipeline reconcile": ("gateway pipeline reconcile --since 2026-11-27T00:00:00 --tolerance 0",),
    "pipeline replay": ("gateway pipeline replay amqp://localhost --archive /archive --rate 100",),
    "pipeline schema": ("gateway pipeline schema telemetry --last 10",),
    "pipeline ship": ("gateway pipeline ship --to s3a://plant/journal --keep-days 365",),
    "pipeline table": ("gateway pipeline table telemetry --to /tables/telemetry --follow",),
    "publish": (
        "gateway publish mqtt://localhost --topic plant/l1/temp --message 21.5",
        "gateway publish amqp://guest:guest@localhost --queue orders --file order.json",
    ),
    "queues delete": (
        "gateway queues delete --queue 'junk-*'",
        "gateway queues delete --empty --idle-longer-than 7d",
    ),
    "queues list": ("gateway queues list --not-empty --sort messages --limit 10",),
    "queues purge": ("gateway queues purge --queue orders",),
    "retained delete": ("gateway retained delete --topic 'plant/old/#'",),
    "retained list": ("gateway retained list --topic 'plant/#'",),
    "routes list": ("gateway routes list", "gateway routes list --name 'telemetry*'"),
    "routes pause": ("gateway routes pause telemetry",),
    "routes resume": ("gateway routes resume telemetry",),
    "run": ("gateway run", "gateway run --config gateway.yaml"),
    "schema": ("gateway schema > mapping.schema.json",),
    "sessions delete": ("gateway sessions delete --client 'press-*' --idle-longer-than 7d",),
    "sessions list": ("gateway sessions list --not-in-use --limit 20",),
    "status": ("gateway status", "gateway status --url https://gateway.example:8080 --json"),
    "store backup": ("gateway store backup --config gateway.yaml --to /backup/monday",),
    "store check": ("gateway store check --store /backup/monday",),
    "store repair": ("gateway store repair --config gateway.yaml",),
    "store restore": ("gateway store restore --config gateway.yaml --from /backup/monday",),
    "subscribe": (
        "gateway subscribe mqtt://localhost --topic 'plant/#'",
        "gateway subscribe amqp://guest:guest@localhost --queue orders --count 1",
    ),
    "tap": ("gateway tap --route telemetry", "gateway tap --endpoint mqtt --per-second 100"),
    "test": ("gateway test mapping.yaml",),
    "tokens list": ("gateway tokens list",),
    "tokens make": ("gateway tokens make grafana --days 365", "gateway tokens make deploy --write"),
    "tokens revoke": ("gateway tokens revoke grafana",),
    "top": ("gateway top", "gateway top --once --sort failed"),
    "version": ("gateway version",),
}
"""Examples by command, without the program's name."""
