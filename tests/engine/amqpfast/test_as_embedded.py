"""The tests of the embedded broker's AMQP/Fast listener, with the engine behind it.

What the engine does otherwise, as `docs/guides/replicas-amqpfast.md` tells, stands in EXCEPTIONS with its
reason; everything else must pass.
"""

from __future__ import annotations

from typing import Final

from tests.engine.amqpfast.embedded import taken_from, unknown
from tests.ingress.amqpfast import (
    test_any_order,
    test_clients_of_2005,
    test_compatibility,
    test_refusals,
    test_services,
    test_transactions,
    test_tunnels,
)
from tests.ingress.amqpfast.client import QUEUE, TOPIC

TAKEN: Final = (
    test_any_order,
    test_clients_of_2005,
    test_compatibility,
    test_refusals,
    test_services,
    test_transactions,
    test_tunnels,
)
LATER: Final = "what comes next comes from the cluster, behind the reply and in an order of its own"
SEEN: Final = (
    "who gets what was looked at hears that it may have been delivered; what was sent without a reply "
)
LOOKED: Final = SEEN + "may not be listed yet, and what was listed is shown for a minute"
THERE: Final = "what waits is on the cluster and not in the replica's queue, where the test looks"
BEHIND: Final = "what comes back may come behind what was on its way"
COMING: Final = "what is confirmed may still be on its way here"
REPLACED: Final = "a replica cannot tell what a durable subscription on the cluster is to, and replaces it"
UNEVEN: Final = "a client that waits for a reply gets nothing meanwhile, so that others may get more"
SELECTORS: Final = "a queue of the cluster has no selectors"
IN_2005: Final = "clients_of_2005_a_conversation_goes_as_it_did"
ACK_2005: Final = "ACK is answered on its own channel, and takes only what was there when it was read"
NO_BIT_2005: Final = "C: no bit says that a handle will be browsed, or that it may do anything else"
EXCEPTIONS: Final[dict[str, str]] = {
    f"{IN_2005}[C: what a queue holds, one of it, all of it-openamq-2005]": LOOKED,
    f"{IN_2005}[{NO_BIT_2005}-openamq-2005]": LOOKED,
    f"{IN_2005}[C: ids count from 0 anew at each QUERY, and what was taken has none-openamq-2005]": LOOKED,
    f"{IN_2005}[{ACK_2005}-rfc]": LATER,
    f"{IN_2005}[{ACK_2005}-openamq-2005]": LATER,
    "compatibility_replies_come_first_and_names_may_have_slashes": LOOKED,
    "services_query_lists_and_browse_looks_without_taking": LOOKED,
    "services_unacknowledged_messages_return_in_their_order_when_the_client_is_gone": BEHIND,
    "services_the_window_is_prefetch_and_an_ack_covers_all_handles_of_the_channel": LATER,
    "services_query_of_a_topic_lists_the_handles_own_backlog": COMING,
    f"services_an_index_keeps_to_the_frame_max_of_its_client[{TOPIC}]": COMING,
    **{
        f"services_an_identifier_belongs_to_the_destination_it_was_first_used_for[{name}]": REPLACED
        for name in ("other", "t.", "", "t.u")
    },
    "services_prefetch_0_is_1_and_unreliable_has_no_window": THERE,
    "transactions_what_a_commit_confirms[acked-1]": THERE,
    "transactions_a_message_for_several_destinations_and_many_messages_commit_as_one": THERE,
    "services_each_message_goes_to_one_consumer": UNEVEN,
    "services_a_prefix_means_all_that_begin_with_it": "a beginning is empty or ends in a dot",
    **{
        f"services_selectors[{QUEUE}-{mime_type}-{selector.decode()}-wanted{at}]": SELECTORS
        for at, (mime_type, selector, _) in enumerate(test_services.SELECTORS)
    },
}

for module in TAKEN:
    globals().update(taken_from(module))


def test_exceptions_are_tests() -> None:
    assert not unknown(EXCEPTIONS, globals())
