"""Job `backtest`: apply a candidate mapping to recorded traffic.

Its results are compared with the record or with another mapping. The gateway's own mapping code
(`gateway.mapping`) routes the messages in Python workers; `gateway/pipeline/traffic/fate_counts.py` explains
how this is fast. Targets and guarantees are compared, headers are not: a journal has headers only as they
were received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gateway.pipeline.traffic.fate_counts import (
    FIRST_SQL,
    SECOND_SQL,
    FirstPass,
    columns_for,
    number_of,
    second_pass,
)
from gateway.pipeline.traffic.fates import CandidateMapping, Fate, decode_fates, show_fate
from gateway.pipeline.traffic.loader import Recording
from gateway.pipeline.traffic.verdicts import DeliveryChange, DeliveryVerdict, compare

EXAMPLES: Final = 3
FINE: Final = frozenset((DeliveryVerdict.SAME,))
Place = tuple[str, int]


class Example(NamedTuple):
    """Row of the journal, with the results of the earlier and of the candidate mapping for its message.

    `before` or `after` is None if that mapping does not deliver or refuse the message.
    """

    shard: str
    sequence: int
    before: Fate | None
    after: Fate | None


@dataclass
class BacktestFinding:
    """Group of deliveries with the same verdict, the same route before, and the same route of the candidate.

    `deliveries` is their number, and `examples` has some of them.
    """

    verdict: DeliveryVerdict
    route_before: str
    route_after: str
    deliveries: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class Report:
    """Result of a backtest: the number of messages, and of those whose deliveries have changed.

    `findings` has the groups of deliveries by verdict and routes. `samples` has some messages for each set of
    routes that take a message: their positions in the journal (shard and sequence number).
    """

    messages: int = 0
    changed: int = 0
    findings: dict[tuple[DeliveryVerdict, str, str], BacktestFinding] = field(default_factory=dict)
    samples: dict[tuple[str, ...], list[Place]] = field(default_factory=dict)

    def counts(self) -> Counter[DeliveryVerdict]:
        """Return the number of deliveries for each verdict."""
        found: Counter[DeliveryVerdict] = Counter()
        for finding in self.findings.values():
            found[finding.verdict] += finding.deliveries
        return found

    def unexpected(self, allowed: Sequence[DeliveryVerdict] = ()) -> list[BacktestFinding]:
        """Return the findings whose verdict is neither "unchanged" nor in `allowed`."""
        fine = FINE | set(allowed)
        return [finding for finding in self.sorted() if finding.verdict not in fine]

    def sorted(self) -> list[BacktestFinding]:
        """Return the findings, the most serious first."""
        order = list(DeliveryVerdict)
        return sorted(
            self.findings.values(),
            key=lambda one: (-order.index(one.verdict), one.route_before, one.route_after),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "messages": self.messages,
            "changed": self.changed,
            "findings": [
                {
                    "verdict": finding.verdict.value,
                    "route_before": finding.route_before,
                    "route_after": finding.route_after,
                    "deliveries": finding.deliveries,
                    "examples": [
                        {
                            "shard": example.shard,
                            "sequence": example.sequence,
                            "before": example.before and example.before._asdict(),
                            "after": example.after and example.after._asdict(),
                        }
                        for example in finding.examples
                    ],
                }
                for finding in self.sorted()
            ],
        }


def backtest(
    recording: Recording,
    candidate: CandidateMapping,
    against: CandidateMapping | None = None,
    *,
    samples: int = 0,
) -> Report:
    """Route recorded messages with the mapping `candidate`, and compare the results with earlier ones.

    The earlier results are those of the mapping `against` or, if it is None, the recorded results. `samples`
    is the number of messages to list for each set of routes, from which mapping tests are generated.
    """
    candidates = [candidate] if against is None else [candidate, against]
    first = recording.map_batches(columns_for(candidates), FirstPass(candidate, against), FIRST_SQL)
    counted = first.repartition("key").mapInArrow(second_pass, SECOND_SQL)
    texts: dict[int, str] = {}
    groups = []
    for row in counted.toLocalIterator(prefetchPartitions=True):
        if row["texts"] is not None:
            texts.update((number_of(text), text) for text in row["texts"].split("\n"))
        else:
            groups.append(row)
    return _reported(groups, texts, samples)


def _reported(groups: Sequence[Any], texts: dict[int, str], samples: int) -> Report:
    report = Report()
    fates = {number: decode_fates(text) for number, text in texts.items() if text.startswith("[")}
    for row in groups:
        messages = row["messages"]
        report.messages += messages
        place = (texts[row["shard"]], row["sequence"])
        before = [fate for recipient in row["recipients"] for fate in fates[recipient]]
        after = fates[row["fate"]]
        changes = list(compare(before, after))
        report.changed += messages * any(change.verdict not in FINE for change in changes)
        for change in changes:
            _note(report, change, messages, place)
        rows = report.samples.setdefault(tuple(fate.route for fate in after), [])
        if len(rows) < samples:
            rows.append(place)
    return report


def _note(report: Report, change: DeliveryChange, messages: int, place: Place) -> None:
    names = ["" if fate is None else fate.route for fate in (change.before, change.after)]
    key = (change.verdict, names[0], names[1])
    finding = report.findings.setdefault(key, BacktestFinding(*key))
    finding.deliveries += messages
    if len(finding.examples) < EXAMPLES:
        finding.examples.append(Example(*place, change.before, change.after))


def show(finding: BacktestFinding) -> list[str]:
    """Return a finding with its examples as lines of text."""
    way = f"{finding.route_before or '-'} -> {finding.route_after or '-'}"
    lines = [f"{finding.verdict.value:<10} {finding.deliveries:>10}  {way}"]
    if finding.verdict is not DeliveryVerdict.SAME:
        for shard, sequence, before, after in finding.examples:
            was = "nowhere" if before is None else show_fate(before)
            now = "nowhere" if after is None else show_fate(after)
            lines.append(f"             {shard}:{sequence}  {was}")
            lines.append(f"             {'':<{len(f'{shard}:{sequence}')}}  now {now}")
    return lines
