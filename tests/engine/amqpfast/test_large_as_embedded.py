"""The same as test_as_embedded.py, of gateways that are configured otherwise."""

from __future__ import annotations

from typing import Final

from tests.engine.amqpfast.embedded import taken_from, unknown
from tests.ingress.amqpfast import test_large

TAKEN: Final = (test_large,)
TOO_LARGE: Final = "the cluster takes no more than limits.message_bytes_max"
ELSEWHERE: Final = "a message that is whole is on the cluster, and no file of the replica's"
EXCEPTIONS: Final[dict[str, str]] = {
    "large_what_was_not_wholly_delivered_goes_to_another": TOO_LARGE,
    "large_an_early_acknowledgement_does_not_cover_what_is_still_on_its_way": TOO_LARGE,
    "large_routes_take_it_from_memory_or_not_at_all": TOO_LARGE,
    "large_a_body_that_is_not_there_any_more_costs_the_channel": ELSEWHERE,
    "large_fragments_of_two_channels_interleave_and_the_bodies_wait_on_disk": ELSEWHERE,
    "large_each_subscription_has_the_one_file": ELSEWHERE,
    "large_a_full_spool_costs_the_channel_and_takes_more_when_it_has_room": ELSEWHERE,
    "large_a_body_on_disk_and_one_in_memory_go_through_tls": ELSEWHERE,  # it looks at the spool
    "large_two_deliveries_interleave_and_what_follows_on_a_channel_waits": "it comes when it comes",
}

globals().update(taken_from(test_large))


def test_exceptions_are_tests() -> None:
    assert not unknown(EXCEPTIONS, globals())
