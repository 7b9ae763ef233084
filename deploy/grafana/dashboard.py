"""Generator of gateway.json, the Grafana dashboard: `python -m deploy.grafana.dashboard`.

Grafana's own builders ensure that Grafana can read the file. A test fails if the file is out of date, or
queries a metric that does not exist.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from grafana_foundation_sdk.builders.common import VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

FILE: Final = Path(__file__).with_name("gateway.json")
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${source}")
AT: Final = 'instance=~"$instance"'
ROW_WIDTH: Final = 24
HEIGHT: Final = 8


class Shown(NamedTuple):
    """Panel: its title, Grafana's name of the unit, a description, and a legend for each expression."""

    title: str
    unit: str
    meaning: str
    expressions: dict[str, str]


def rate(metric: str, by: str, where: str = "") -> str:
    chosen = f"{AT},{where}" if where else AT
    return f"sum by ({by}) (rate({metric}{{{chosen}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str) -> str:
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', f'{by}, le' if by else 'le')})"


def total(metric: str, by: str) -> str:
    return f"sum by ({by}) ({metric}{{{AT}}})"


ROWS: Final = {
    "What crosses": (
        Shown(
            "Messages in",
            "cps",
            "Published by clients and brokers.",
            {"{{endpoint}}": rate("gateway_messages_total", "endpoint", 'direction="in"')},
        ),
        Shown(
            "Messages out",
            "cps",
            "Delivered to clients and brokers.",
            {"{{endpoint}}": rate("gateway_messages_total", "endpoint", 'direction="out"')},
        ),
        Shown(
            "Routes",
            "cps",
            "Messages of each route, by what became of them.",
            {"{{route}} {{outcome}}": rate("gateway_route_messages_total", "route, outcome")},
        ),
    ),
    "By protocol": (
        Shown(
            "Frames by protocol and direction",
            "cps",
            "Packets of MQTT, frames or methods of AMQP, commands of AMQP/Fast.",
            {"{{protocol}} {{direction}}": rate("gateway_frames_total", "protocol, direction")},
        ),
        Shown(
            "Bytes by protocol and direction",
            "Bps",
            "Read from and written to sockets.",
            {"{{protocol}} {{direction}}": rate("gateway_network_bytes_total", "protocol, direction")},
        ),
    ),
    "How long it takes": (
        Shown(
            "Until the source has its answer",
            "s",
            "Time from reading a message to the response to its source.",
            {
                "{{endpoint}} p50": quantile(0.5, "gateway_settle_seconds", "endpoint"),
                "{{endpoint}} p99": quantile(0.99, "gateway_settle_seconds", "endpoint"),
            },
        ),
        Shown(
            "Through a route",
            "s",
            "Time from reading a message to its acceptance by the route's target or outbox.",
            {
                "{{route}} p50": quantile(0.5, "gateway_route_seconds", "route"),
                "{{route}} p99": quantile(0.99, "gateway_route_seconds", "route"),
            },
        ),
    ),
    "What does not arrive": (
        Shown(
            "Dead letters",
            "cps",
            "Messages that became dead letters, by route and reason.",
            {"{{route}}: {{reason}}": rate("gateway_dead_lettered_total", "route, reason")},
        ),
        Shown(
            "Dropped",
            "cps",
            "Dropped by the embedded broker, and answers that nobody took.",
            {
                "{{reason}}": rate("gateway_dropped_total", "reason"),
                "answer: {{reason}}": rate("gateway_answers_lost_total", "reason"),
            },
        ),
        Shown(
            "Refused to sources",
            "cps",
            "Sources that were told no, and why.",
            {
                "{{endpoint}}: {{reason}}": rate(
                    "gateway_settled_total", "endpoint, reason", 'outcome!="accepted"'
                )
            },
        ),
        Shown(
            "Denied",
            "cps",
            "What clients asked for and may not do, and logins that failed.",
            {
                "{{endpoint}}: {{action}}": rate("gateway_denied_total", "endpoint, action"),
                "{{endpoint}}: login {{outcome}}": rate(
                    "gateway_logins_total", "endpoint, outcome", 'outcome!="accepted"'
                ),
            },
        ),
    ),
    "What waits": (
        Shown(
            "Outboxes",
            "short",
            "Messages that wait for a link.",
            {"{{route}}": total("gateway_outbox_messages", "route")},
        ),
        Shown(
            "The oldest in an outbox",
            "s",
            "How long the oldest message has waited.",
            {"{{route}}": f"max by (route) (gateway_outbox_oldest_seconds{{{AT}}})"},
        ),
        Shown(
            "Queues",
            "short",
            "Messages in the embedded broker's queues and sessions, dead letters, retained topics.",
            {
                "queues": total("gateway_queue_messages", "instance"),
                "dead letters": total("gateway_dead_letters", "instance"),
                "retained": total("gateway_retained_messages", "instance"),
            },
        ),
        Shown(
            "On their way",
            "short",
            "Messages of routes and links that are not settled.",
            {
                "{{route}}": total("gateway_route_in_flight", "route"),
                "link {{endpoint}}": total("gateway_link_in_flight", "endpoint"),
            },
        ),
    ),
    "Who is there": (
        Shown(
            "Connections",
            "short",
            "Open connections.",
            {"{{endpoint}}": total("gateway_connections", "endpoint")},
        ),
        Shown(
            "Connections that come and are turned away",
            "cps",
            "Accepted, and refused by reason.",
            {
                "{{endpoint}}": rate("gateway_connections_accepted_total", "endpoint"),
                "{{endpoint}} refused: {{reason}}": rate(
                    "gateway_connections_refused_total", "endpoint, reason"
                ),
            },
        ),
        Shown(
            "Links",
            "bool_yes_no",
            "Whether a link has its broker.",
            {"{{endpoint}}": f"min by (endpoint) (gateway_link_up{{{AT}}})"},
        ),
        Shown(
            "Sessions, subscriptions, consumers",
            "short",
            "What the embedded broker holds.",
            {
                "sessions": total("gateway_sessions", "instance"),
                "subscriptions": total("gateway_subscriptions", "instance"),
                "consumers": total("gateway_consumers", "instance"),
            },
        ),
    ),
    "The process": (
        Shown(
            "Processor",
            "percentunit",
            "Of one core; the loop is one thread.",
            {"{{instance}}": f"rate(process_cpu_seconds_total{{{AT}}}[$__rate_interval])"},
        ),
        Shown(
            "Memory",
            "bytes",
            "What the process occupies, and where publishers are stopped.",
            {
                "{{instance}}": f"gateway_memory_bytes{{{AT}}}",
                "{{instance}} limit": f"gateway_memory_limit_bytes{{{AT}}}",
            },
        ),
        Shown(
            "Steps of the loop",
            "s",
            "While a task takes a step, nobody else is served.",
            {"p99.9": quantile(0.999, "gateway_loop_turn_seconds", "")},
        ),
        Shown(
            "Disk",
            "Bps",
            "Bytes of messages written to the store and to the journal.",
            {
                "store": rate("gateway_store_written_bytes_total", "instance"),
                "journal": rate("gateway_journal_written_bytes_total", "instance"),
            },
        ),
    ),
}


def panel(shown: Shown, width: int) -> Panel:
    built = (
        Panel()
        .title(shown.title)
        .description(shown.meaning)
        .unit(shown.unit)
        .min(0)
        .datasource(SOURCE)
        .span(width)
        .height(HEIGHT)
        .fill_opacity(8)
        .legend(
            VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    for number, (legend, expression) in enumerate(shown.expressions.items()):
        query = Dataquery().expr(expression).legend_format(legend).range().ref_id(chr(ord("A") + number))
        if expression.startswith("histogram_quantile"):
            query.exemplar(True)  # where tracing is on, a point leads to its trace
        built.with_target(query)
    return built


def dashboard() -> Dashboard:
    built = (
        Dashboard("Gateway")
        .uid("gateway")
        .tags(["gateway", "mqtt", "amqp"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            QueryVariable("instance")
            .label("Instance")
            .datasource(SOURCE)
            .query("label_values(gateway_build_info, instance)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
        )
    )
    ids = count(1)
    for title, shown in ROWS.items():
        built.with_row(Row(title).id(next(ids)))
        for one in shown:
            built.with_panel(panel(one, ROW_WIDTH // len(shown)).id(next(ids)))
    return built


def written() -> str:
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard().build()) + "\n"


if __name__ == "__main__":
    FILE.write_text(written())
