"""The console in a real Chromium: what an operator finds there, by the roles and names that a reader has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock
from urllib.parse import quote

import httpx
import paho.mqtt.client as mqtt
import pika
import pytest
from axe_playwright_python.base import AXE_SCRIPT
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from playwright.sync_api import Browser, Page, expect, sync_playwright
from pydantic import SecretStr

from gateway.admin import object_history
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import AmqpPermissions, Http, MqttRules, Role, StoreSettings, User
from gateway.settings.journal import Journal
from tests.configured import make_link
from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.servers import free_ports
from tests.needs import needed
from tests.operator import bearer
from tests.passwords import hashed

CHROMIUM: Final = "/usr/bin/chromium"
VIEWS: Final = (
    *("Overview", "Routes", "Links", "Connections", "Sessions", "Queues", "Exchanges", "Retained"),
    *("Destinations", "Dead letters", "Mappings", "Journal", "Tap", "Users", "Limits"),
)
PAGES: Final = {
    "Client press 7": "client?client=press+7&protocol=mqtt",
    "Client worker": "client?address=WORKER&endpoint=amqp091",
    "Queue stuck": "queue?protocol=amqp091&virtual_host=%2F&kind=queue&queue=stuck",
    "Exchange bells": "exchange?virtual_host=%2F&name=bells",
    "Route alarms": "route?name=alarms",
    "Route away": "route?name=away",
    "Link erp": "link?name=erp",
    "Listener mqtt": "listener?name=mqtt",
}
# What is of any colour anywhere is in these.
COLOURED: Final = ("Overview", "Queues", "Mappings", "Queue stuck", "Link erp", "Route alarms")
MAPPING: Final = """version: 1
routes:
  - name: readings
    from: {endpoint: mqtt, topic: "plant/{line}/reading"}
    to: {endpoint: amqp091, queue: stuck}
  - name: alarms
    from: {endpoint: mqtt, topic: "plant/{line}/alarm"}
    to: {endpoint: amqp091, queue: "alarm"}
    on_reject: dead_letter
  - name: away
    from: {endpoint: mqtt, topic: "away"}
    to: {endpoint: erp, exchange: "", routing_key: "away"}
    settle: stored
"""
SIFTED: Final = """version: 1
routes:
  - name: sifted
    from: {endpoint: mqtt, topic: "sifted"}
    to: {endpoint: amqp091, queue: stuck}
    when: >-
      retain && headers["unit"] == " C=d" && headers["kind"] == "x"
      && client_id == "press 7" && user == "ann"
    headers: {by: "{client_id}"}
"""
MENDED: Final = MAPPING.replace('queue: "alarm"', 'queue: "alarms"')


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("console") / "mapping.yaml"
    made.write_text(MAPPING)
    return made


@pytest.fixture(scope="module")
def gateway(file: Path) -> Iterator[Running]:
    """With a queue that nobody consumes, a route that fails, a client, and a session."""
    settings = settings_of(
        http=Http(host=LOOPBACK, port=0),
        store=StoreSettings(path=file.parent / "data"),
        journal=Journal(enabled=True),
        mappings=(str(file),),
        links={"erp": make_link(url=f"amqp://{LOOPBACK}:{free_ports(1)[0]}")},
        users={
            "ann": User(password_hash=SecretStr(hashed("right")), roles=("boss",)),
            "bob": User(password_hash=SecretStr(hashed("right")), roles=("looker",)),
            "eve": User(password_hash=SecretStr(hashed("right")), roles=("looker of shop",)),
        },
        roles={
            "boss": Role(
                console="write", console_bodies=True, mqtt=MqttRules(publish=("#",), subscribe=("#",))
            ),
            "looker": Role(console="read", console_bodies=True),
            "looker of shop": Role(console="read", console_virtual_hosts=("shop",)),
            "all": Role(amqp091={"/": AmqpPermissions(configure=".*", write=".*", read=".*")}),
        },
        default_roles={"guest": ("all",), "anonymous": ("boss",)},
    )
    # Patched before the gateway starts: its first sleep between two readings would otherwise last 30 s.
    with mock.patch.object(object_history, "STEP_SECS", 1), running(settings) as started:
        connection = pika.BlockingConnection(pika.URLParameters(started.idle_amqp_url))
        channel = connection.channel()
        for name in ("stuck", "alarms", "jobs"):
            channel.queue_declare(name, durable=True)
        channel.exchange_declare("bells", "headers")
        channel.queue_bind("alarms", "bells", "any", {"x-match": "any", "line": "l1"})
        channel.basic_qos(prefetch_count=7)
        channel.basic_consume("jobs", lambda *_: None, consumer_tag="hand")
        client = mqtt.Client(CallbackAPIVersion.VERSION2, "press 7", protocol=mqtt.MQTTv5)
        client.connect(LOOPBACK, started.mqtt)
        client.loop_start()
        client.subscribe("plant/+/command", 1)
        for number in range(3):
            client.publish("plant/l1/reading", f"21.{number}", 1).wait_for_publish(10)
        told = Properties(PacketTypes.PUBLISH)
        told.ContentType, told.UserProperty = "text/plain", [("sensor", "t4")]
        client.publish("plant/l1/alarm", "too hot", 1, properties=told).wait_for_publish(10)
        client.publish("away", "waits", 1).wait_for_publish(10)
        started.until(lambda: len(started.gateway.dead_letters) == 1)
        yield started
        client.disconnect()
        client.loop_stop()
        connection.close()


@needed("Chromium")
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        missing("Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        chosen = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chosen
        chosen.close()


class Scene:
    """A page of the console, and what the browser has complained of."""

    def __init__(self, browser: Browser, gateway: Running, **more: Any) -> None:
        self.at = f"http://{LOOPBACK}:{gateway.gateway.http_port}"
        self.context = browser.new_context(**more)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("dialog", lambda dialog: dialog.accept())

    def _heard(self, message: Any) -> None:
        if message.type == "error" and "status of 401" not in message.text:
            self.complaints.append(message.text)

    def log_in(self, user: str = "ann", first: str = "Overview") -> None:
        self.page.goto(self.at)
        self.page.get_by_label("User").fill(user)
        self.page.get_by_label("Password").fill("right")
        self.page.get_by_role("button", name="Log in").click()
        expect(self.page.get_by_role("heading", name=first, exact=True, level=2)).to_be_visible()

    def turn(self, view: str) -> None:
        self.page.get_by_role("link", name=view, exact=True).click()
        expect(self.page.get_by_role("heading", name=view, exact=True, level=2)).to_be_visible()

    def row(self, text: str) -> Any:
        return self.page.get_by_role("row").filter(has_text=text)

    def shot(self, name: str) -> None:
        """For eyes: CONSOLE_PICTURES names a folder."""
        if folder := os.environ.get("CONSOLE_PICTURES"):
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=True)

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []


def put(file: Path, text: str) -> None:
    """At once: the gateway watches the file, and half of it is no mapping."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(file)


def serious(page: Page) -> list[str]:
    """What axe finds that keeps somebody out."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa', 'best-practice']})")["violations"]
    return [
        f"{one['id']}: {node['html']}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def mend(scene: Scene, file: Path) -> None:
    """Try a faulty and a mended draft of the mapping, then put that into the file, and reload."""
    page = scene.page
    scene.turn("Mappings")
    draft = page.get_by_label(str(file))
    draft.fill(MAPPING.replace("to:", "too:"))
    page.get_by_label("Endpoint").select_option("mqtt")
    page.get_by_label("Topic").fill("plant/l1/alarm")
    page.get_by_label("Body").fill("too hot")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_text("The draft is invalid")).to_be_visible()
    expect(page.get_by_text("did you mean 'to'").first).to_be_visible()
    draft.fill(MENDED)
    page.get_by_role("button", name="Explain").click()
    told = page.get_by_role("listitem").filter(has_text="matches")
    expect(told).to_contain_text("alarms matches, to amqp091: ")
    expect(told).to_contain_text("too hot")
    assert file.read_text() == MAPPING, "trying changes nothing"
    put(file, MENDED)
    page.get_by_role("button", name="Reload", exact=True).click()
    expect(page.get_by_text("reloaded: 3 routes")).to_be_visible()


def test_an_operator_finds_what_is_stuck_and_mends_it(browser: Browser, gateway: Running, file: Path) -> None:
    """A queue is stuck: look in, open the dead letter, mend its route, redrive it; it arrives once."""
    scene = Scene(browser, gateway)
    page = scene.page
    scene.log_in()
    state = page.get_by_text("ready", exact=True)
    expect(state).to_be_visible()
    seen = state.evaluate("one => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor]")
    assert seen == ["rgb(255, 255, 255)", "rgb(20, 105, 58)"]
    scene.turn("Queues")
    expect(scene.row("stuck")).to_contain_text("none")
    page.get_by_role("button", name="Peek stuck").click()
    dialog = page.get_by_role("dialog")
    first = dialog.get_by_role("row").filter(has_text="21.0")
    expect(first).to_contain_text("press 7")
    first.get_by_role("button").click()
    expect(dialog.get_by_role("definition").filter(has_text="press 7")).to_be_visible()
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()
    scene.turn("Routes")
    expect(scene.row("alarms")).to_have_text(re.compile("alarms.*mqtt.*amqp091"))
    failed = scene.row("alarms").locator(".bad")
    expect(failed.first).to_have_text("1")
    scene.turn("Overview")
    page.get_by_role("link", name="dead letters: 1", exact=True).click()
    expect(scene.row("alarms")).to_contain_text("no_route")
    scene.row("alarms").get_by_role("button", name="Show").click()
    letter = page.get_by_role("dialog")
    for text in ("no_route", "too hot", "text/plain", "sensor", "t4", "press 7", "plant/l1/alarm"):
        expect(letter).to_contain_text(text)
    scene.shot("letter")
    letter.get_by_role("button", name="Close").click()
    scene.row("alarms").get_by_role("link", name="alarms").click()
    expect(page.get_by_role("heading", name="Route alarms", exact=True)).to_be_visible()
    expect(page.get_by_role("heading", name="Dead letters, newest first: 1", exact=True)).to_be_visible()
    mend(scene, file)
    scene.turn("Dead letters")
    page.get_by_role("button", name=re.compile("^Redrive [^a]")).click()
    expect(page.get_by_text("1 redriven")).to_be_visible()
    expect(page.get_by_text("No dead letters.")).to_be_visible()
    scene.turn("Queues")
    scene.row("alarms").get_by_role("link", name="alarms", exact=True).click()
    expect(page.get_by_role("heading", name="Queue alarms", exact=True)).to_be_visible()
    page.get_by_role("button", name="Peek alarms").click()
    expect(dialog).to_contain_text("Messages waiting: 1.")
    expect(dialog).to_contain_text("Messages shown: 1")
    dialog.get_by_role("row").get_by_role("button", name="alarms").click()
    for text in ("too hot", "text/plain", "sensor", "t4"):
        expect(dialog).to_contain_text(text)
    scene.shot("arrived once")
    scene.close()


def test_an_object_has_a_page_with_all_that_belongs_to_it(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    page = scene.page

    def fact(name: str) -> Any:
        said = page.locator("dl.facts > div").filter(has=page.get_by_text(name, exact=True))
        return said.get_by_role("definition")

    def drawn(title: str) -> Any:
        return page.get_by_role("img", name=re.compile(f"^{title}, "))

    scene.log_in()
    scene.turn("Queues")
    scene.row("jobs").get_by_role("link", name="jobs").click()
    expect(page).to_have_title("gateway: Queue jobs")
    expect(page.get_by_role("link", name="Queues", exact=True)).to_have_attribute("aria-current", "true")
    expect(fact("Message limit")).to_have_text("0 of 1.00 M")
    expect(drawn("Messages waiting")).to_have_attribute("aria-label", re.compile("ready: at most 0"))
    expect(page.get_by_text("This chart begins when the page was opened")).to_be_hidden()
    expect(drawn("Messages waiting")).to_have_attribute("aria-label", re.compile("ready: at most 0"))
    expect(scene.row("hand")).to_contain_text("7")
    scene.row("hand").get_by_role("link").click()
    expect(page.get_by_role("heading", name=re.compile("^Client 127"))).to_be_visible()
    expect(fact("product")).to_contain_text("Pika")
    expect(fact("Virtual host")).to_have_text("/")
    expect(drawn("Bytes")).to_be_visible()
    expect(page.get_by_text("This chart begins when the page was opened")).to_be_hidden()
    expect(scene.row("hand").get_by_role("link", name="jobs")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Queue jobs", exact=True)).to_be_visible()
    scene.turn("Sessions")
    page.get_by_role("link", name="press 7").click()
    expect(scene.row("plant/+/command")).to_be_visible()
    expect(drawn("Messages in flight")).to_be_visible()
    page.goto(f"{scene.at}/#/{PAGES['Exchange bells']}")
    expect(scene.row("x-match")).to_contain_text("alarms")
    scene.row("x-match").get_by_role("link", name="alarms").click()
    expect(scene.row("bells")).to_contain_text("any")
    scene.turn("Overview")
    scene.row("GatewayOptionalLinkDown").get_by_role("link").click()
    expect(page.get_by_role("heading", name="Link erp", exact=True)).to_be_visible()
    expect(fact("State")).to_contain_text("down")
    expect(drawn("Outcomes")).to_be_visible(timeout=25_000)
    expect(scene.row("the link is down")).to_contain_text("then reject")
    scene.row("the link is down").get_by_role("link", name="away").click()
    expect(fact("Settles")).to_have_text("stored")
    expect(drawn("Messages")).to_have_attribute("aria-label", re.compile("matched: at most"))
    page.goto(f"{scene.at}/#/queue?queue=none")
    expect(page.get_by_text("This queue does not exist.")).to_be_visible()
    scene.close()


def test_each_figure_leads_to_its_rows(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    page = scene.page
    scene.log_in()
    figures = page.locator(".numbers dd")
    expect(figures.first).to_be_visible()
    without = [text for text in figures.all_inner_texts() if text not in ("healthy", "off")]
    assert page.locator(".numbers dd a").count() == len(without) >= 8
    targets = [link.get_attribute("href") for link in page.locator(".numbers dd a").all()]
    assert {str(target).removeprefix("#/") for target in targets} <= {
        view.lower().replace(" ", "-") for view in VIEWS
    }
    page.get_by_role("link", name=re.compile("^dead letters: ")).click()
    expect(page.get_by_role("heading", name="Dead letters", exact=True)).to_be_visible()
    scene.turn("Overview")
    scene.row("mqtt listener").get_by_role("link", name=re.compile("connected")).click()
    expect(page.get_by_role("heading", name="Connections", exact=True)).to_be_visible()
    expect(page.get_by_label("Listener", exact=True)).to_have_value("mqtt")
    expect(scene.row("press 7")).to_be_visible()
    expect(scene.row("amqp091")).to_have_count(0)
    expect(scene.row("press 7")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d UTC"))
    page.go_back()
    expect(page.get_by_role("heading", name="Overview", exact=True)).to_be_visible()
    scene.close()


def test_a_table_is_sorted_by_a_click_on_a_heading(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    page = scene.page

    def first(column: str) -> Any:
        return page.get_by_role("table").filter(has=page.get_by_role("columnheader", name=column)).first

    def names() -> list[str]:
        return [row.locator("td").first.inner_text() for row in first("Kind").locator("tbody tr").all()]

    scene.log_in()
    expect(scene.row("mqtt listener")).to_be_visible()
    for way, expected in (
        ("ascending", ["amqp091", "amqpfast", "erp", "mqtt"]),
        ("descending", ["mqtt", "erp", "amqpfast", "amqp091"]),
    ):
        page.get_by_role("button", name="Name", exact=True).click()
        expect(page.get_by_role("columnheader", name="Name", exact=False)).to_have_attribute("aria-sort", way)
        expect(first("Kind").locator("tbody tr td").first).to_have_text(expected[0])
        assert names() == expected
    scene.turn("Queues")
    with page.expect_request(re.compile("queues.*sort=messages")):
        page.get_by_role("button", name="Messages", exact=True).click()
    expect(page.locator("tbody tr td").first).to_have_text("stuck")
    scene.turn("Connections")
    with page.expect_request(re.compile("connections.*sort=bytes_in")):
        page.get_by_role("button", name="In /s", exact=True).click()
    expect(page.get_by_role("columnheader", name="In /s")).to_have_attribute("aria-sort", "descending")
    expect(scene.row("press 7")).to_be_visible()
    page.get_by_role("button", name="In /s", exact=True).click()
    expect(page.get_by_role("columnheader", name="In /s")).not_to_have_attribute("aria-sort", "descending")
    scene.turn("Limits")
    page.get_by_role("button", name="Used", exact=True).click()
    expect(page.locator("tbody tr td").first).to_have_text("memory_bytes_max")
    assert serious(page) == []
    scene.close()


def test_an_alarm_says_since_when_and_what_to_do(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    page = scene.page
    scene.log_in()
    scene.turn("Routes")
    page.get_by_role("button", name="Pause readings").click()
    scene.turn("Overview")
    alarm = scene.row("GatewayPaused")
    expect(alarm).to_contain_text("route readings", timeout=15_000)
    expect(alarm).to_contain_text(re.compile(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"))
    expect(alarm).to_contain_text("Resume it")
    expect(alarm).to_contain_text("runbook.md#gatewaypaused")
    alarm.get_by_role("link", name="GatewayPaused").click()
    page.get_by_role("button", name="Resume readings").click()
    expect(page.get_by_role("button", name="Pause readings")).to_be_visible()
    scene.turn("Overview")
    expect(scene.row("GatewayPaused")).to_have_count(0, timeout=15_000)
    scene.close()


def test_frames_are_drawn_by_protocol_and_direction(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    scene.log_in()
    chart = scene.page.get_by_role("img", name=re.compile("^Frames by protocol and direction, per second"))
    expect(chart).to_be_visible(timeout=25_000)
    for line in ("mqtt in", "mqtt out", "amqp091 in"):
        expect(chart).to_have_attribute("aria-label", re.compile(f"{line}: at most"))
    scene.close()


def test_a_route_is_paused_and_goes_on(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    scene.log_in()
    scene.turn("Routes")
    scene.page.get_by_role("button", name="Pause readings").click()
    expect(scene.page.get_by_text("readings: paused")).to_be_visible()
    expect(scene.page.get_by_role("img", name=re.compile("readings: paused, 0 held"))).to_be_visible()
    scene.page.get_by_role("button", name="Resume readings").click()
    expect(scene.page.get_by_role("button", name="Pause readings")).to_be_visible()
    scene.close()


def test_a_message_is_tried_with_all_that_it_has(browser: Browser, gateway: Running, file: Path) -> None:
    """Conditions and templates may ask for each of it."""
    scene = Scene(browser, gateway)
    page = scene.page
    scene.log_in()
    scene.turn("Mappings")
    page.get_by_label(str(file)).fill(SIFTED)
    page.get_by_label("Endpoint").select_option("mqtt")
    page.get_by_label("Topic").fill("sifted")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_text("0 of 1 routes match")).to_be_visible()
    page.get_by_label("Headers").fill("unit = C=d\n\n kind=x")
    page.get_by_label("Retain").select_option("yes")
    page.get_by_label("Reply to").fill("answers/1")
    page.get_by_label("Client").fill("press 7")
    page.get_by_label("User").fill("ann")
    page.get_by_role("button", name="Explain").click()
    told = page.get_by_role("listitem").filter(has_text="matches")
    expect(told).to_contain_text("sifted matches, to amqp091: ")
    expect(told).to_contain_text("press 7")
    scene.shot("sandbox")
    page.get_by_label("Headers").fill("unit")
    page.get_by_role("button", name="Explain").click()
    expect(page.get_by_text("a header is NAME=VALUE, not unit")).to_be_visible()
    scene.close()


def test_what_needs_eyes_is_in_the_picture(browser: Browser, gateway: Running, file: Path) -> None:
    """Of more routes than are drawn those that wait come before those that are busy."""
    row = """  - name: ROUTE
    from: {endpoint: mqtt, topic: "many/ROUTE"}
    to: {endpoint: amqp091, queue: stuck}
"""
    before = file.read_text()
    names = [f"r{number:02}" for number in range(30)]
    put(file, "version: 1\nroutes:\n" + "".join(row.replace("ROUTE", name) for name in names))
    scene = Scene(browser, gateway)
    page = scene.page
    scene.log_in()
    scene.turn("Mappings")
    page.get_by_role("button", name="Reload", exact=True).click()
    expect(page.get_by_text("reloaded: 30 routes")).to_be_visible()
    scene.turn("Routes")
    expect(page.get_by_text("24 of 30 routes are drawn")).to_be_visible()
    picture = page.get_by_role("img", name=re.compile("by r00"))
    expect(picture).not_to_have_attribute("aria-label", re.compile("by r29"))
    page.get_by_role("button", name="Pause r29").click()
    expect(page.get_by_role("img", name=re.compile("by r29: paused"))).to_be_visible()
    scene.shot("many routes")
    page.get_by_role("button", name="Resume r29").click()
    expect(page.get_by_role("button", name="Pause r29")).to_be_visible()
    put(file, before)
    scene.turn("Mappings")
    page.get_by_role("button", name="Reload", exact=True).click()
    expect(page.get_by_text("reloaded: 3 routes")).to_be_visible()
    scene.close()


def test_what_is_there_beside_queues(browser: Browser, gateway: Running) -> None:
    """Exchanges and what is bound to them; what is retained, until somebody clears it; who may do what."""
    client = mqtt.Client(CallbackAPIVersion.VERSION2, "keeper", protocol=mqtt.MQTTv5)
    client.connect(LOOPBACK, gateway.mqtt)
    client.loop_start()
    for topic in ("kept/<one>", "kept/two"):
        client.publish(topic, "on", 1, retain=True).wait_for_publish(10)
    scene = Scene(browser, gateway)
    page = scene.page
    scene.log_in()
    scene.turn("Exchanges")
    expect(scene.row("bells").first).to_have_text(re.compile("bells/headers"))
    bound = page.get_by_role("row").filter(has_text="x-match")
    expect(bound).to_have_text(re.compile('bells/anyalarmsqueue.*"line":"l1"'))
    scene.turn("Retained")
    expect(scene.row("kept/<one>")).to_contain_text("keeper")
    page.get_by_role("button", name="Delete kept/<one>").click()
    expect(page.get_by_text("1 deleted")).to_be_visible()
    expect(scene.row("kept/<one>")).to_have_count(0)
    expect(scene.row("kept/two")).to_be_visible()
    scene.turn("Destinations")
    expect(page.get_by_text("No destinations.")).to_be_visible()
    expect(page.get_by_text("No resumable transfers.")).to_be_visible()
    scene.turn("Users")
    expect(scene.row("ann")).to_have_text("annboss")
    expect(scene.row("looker").last).to_contain_text("read")
    scene.turn("Connections")
    expect(scene.row("keeper")).to_contain_text("mqtt v5")
    scene.close()
    client.publish("kept/two", "", 1, retain=True).wait_for_publish(10)
    client.disconnect()
    client.loop_stop()


def test_what_nobody_had_subscribed_to_is_no_warning(browser: Browser, gateway: Running) -> None:
    """The story's dead letter is one; a device that nobody listens to is no fault."""
    outcome = Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "nobody")
    letters = gateway.gateway.dead_letters
    scene = Scene(browser, gateway)
    scene.log_in()
    shown = scene.page.locator("dl.numbers div").filter(has_text="dead letters").locator("dd")
    everything = bearer(gateway.gateway.http_port)
    purged = httpx.post(f"{scene.at}/api/v1/dead-letters/purge", json={"all": True}, headers=everything)
    assert purged.status_code == 200
    gateway.ask(lambda: letters.add([Message(topic_address("a"), b"")], "", outcome))
    for route, kind in (("", ""), ("alarms", "warn")):
        if route:
            gateway.ask(lambda: letters.add([Message(topic_address("a"), b"")], "alarms", outcome))
        expect(shown).to_have_class(kind)
    scene.close()


def test_an_act_on_a_row_is_about_that_row_alone(browser: Browser, gateway: Running) -> None:
    """Clients choose names, and `*` is one: what stands in a row is no pattern."""
    for name in ("*", "press 9"):
        client = mqtt.Client(CallbackAPIVersion.VERSION2, name, protocol=mqtt.MQTTv5)
        stays = Properties(PacketTypes.CONNECT)
        stays.SessionExpiryInterval = 600
        client.connect(LOOPBACK, gateway.mqtt, properties=stays)
        client.loop_start()
        client.subscribe("x", 1)
        gateway.until(lambda name=name: name in gateway.gateway.mqtt.sessions)
        client.disconnect()
        client.loop_stop()
    connection = pika.BlockingConnection(pika.URLParameters(gateway.amqp_url))
    channel = connection.channel()
    channel.confirm_delivery()
    for name in ("job*", "job1"):
        channel.queue_declare(name)
        channel.basic_publish("", name, b"kept")
    scene = Scene(browser, gateway)
    page = scene.page
    scene.log_in()
    scene.turn("Sessions")
    page.get_by_role("button", name="Delete *", exact=True).click()
    expect(page.get_by_text("1 deleted")).to_be_visible()
    expect(scene.row("press 9")).to_be_visible()
    scene.turn("Queues")
    page.get_by_role("button", name="Purge job*", exact=True).click()
    expect(page.get_by_text("1 messages purged")).to_be_visible()
    page.get_by_role("button", name="Delete job*", exact=True).click()
    expect(page.get_by_text("1 deleted")).to_be_visible()
    assert len(gateway.ask(lambda: gateway.gateway.host.queues["job1"])) == 1
    scene.close()
    channel.queue_delete("job1")
    connection.close()


def test_who_only_reads_finds_nothing_to_change(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    scene.log_in("bob")
    expect(scene.page.get_by_text("bob (read)")).to_be_visible()
    for view in (*VIEWS[1:], *(page for page in PAGES if page != "Client worker")):
        if view in VIEWS:
            scene.turn(view)
        else:
            scene.page.goto(f"{scene.at}/#/{PAGES[view]}")
            expect(scene.page.get_by_role("heading", name=view, exact=True)).to_be_visible()
            expect(scene.page.get_by_role("heading", name="State", exact=True)).to_be_visible()
        expect(scene.page.get_by_text("…", exact=True)).to_have_count(0)
        words = re.compile(r"\b(Pause|Purge|Delete|Redrive|Disconnect|Publish|Reload|Peek|Explain)\b")
        expect(scene.page.get_by_role("button", name=words)).to_have_count(0)
    scene.page.get_by_role("button", name="Log out").click()
    expect(scene.page.get_by_role("button", name="Log in")).to_be_visible()
    scene.page.goto(scene.at)
    expect(scene.page.get_by_role("button", name="Log in")).to_be_visible()
    scene.close()


PHONE: Final = 600
HIDES: Final = "region => region.scrollWidth > region.clientWidth"
SIZES: Final = [("light", 1_440), ("dark", 360)]
if "CONSOLE_PICTURES" in os.environ:
    SIZES.extend((("light", 390), ("dark", 390), ("dark", 1_440)))


@pytest.mark.parametrize("scheme, width", SIZES)
def test_every_view_is_for_everybody(browser: Browser, gateway: Running, scheme: Any, width: int) -> None:
    """axe finds nothing serious, and nothing is wider than the window, however narrow that is.

    Each card has a heading, and the tab of the view is in sight.
    """
    scene = Scene(browser, gateway, color_scheme=scheme, viewport={"width": width, "height": 900})
    page = scene.page
    page.goto(scene.at)
    assert serious(page) == []
    scene.log_in()
    consumers = httpx.get(
        f"{scene.at}/api/v1/consumers?queue=jobs", headers=bearer(gateway.gateway.http_port)
    )
    worker = consumers.json()["items"][0]["address"]
    for view in (*VIEWS, *PAGES):
        if view in VIEWS:
            scene.turn(view)
        else:
            page.goto(f"{scene.at}/#/{PAGES[view].replace('WORKER', quote(worker))}")
            title = view.replace("worker", worker)
            expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        expect(page.get_by_text("…", exact=True)).to_have_count(0)
        expect(page.locator("main section").first).to_be_visible()
        assert page.locator("main section:not(:has(h3))").count() == 0, view
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, view
        if width < PHONE:  # no column is out of sight
            tables = page.locator(".scroll:has(table)").all()
            assert [one.get_attribute("aria-label") for one in tables if one.evaluate(HIDES)] == [], view
        expect(page.locator("nav [aria-current]")).to_be_in_viewport(ratio=0.99)
        assert (scheme == "dark" and view not in COLOURED) or serious(page) == [], view
        scene.shot(f"{view} {scheme} {width}")
    scene.close()


def test_a_wide_window_is_used(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway, viewport={"width": 2_560, "height": 1_200})
    scene.log_in()
    box = scene.page.get_by_role("main").bounding_box()
    assert box is not None
    assert box["width"] > 2_000
    scene.shot("wide")
    scene.close()


def test_messages_are_watched_as_they_pass(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    page = scene.page
    scene.log_in("bob")
    scene.turn("Tap")
    page.get_by_label("Route").fill("readings")
    page.get_by_role("button", name="Watch").click()
    expect(page.get_by_text("Watching.")).to_be_visible()
    taps = gateway.gateway.dispatcher.taps
    gateway.until(lambda: len(taps.open) == 1)
    client = mqtt.Client(CallbackAPIVersion.VERSION2, "press 8")
    client.connect(LOOPBACK, gateway.mqtt)
    client.loop_start()
    for topic in ("plant/l1/other", "plant/l1/reading"):
        client.publish(topic, "<b>22</b>", 1).wait_for_publish(10)
    client.disconnect()
    client.loop_stop()
    row = page.get_by_role("row").filter(has_text="press 8")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("<b>22</b>")
    opens = row.get_by_role("button", name="stuck")
    opens.click()
    expect(opens).to_have_attribute("aria-expanded", "true")
    expect(page.locator("tr.opened pre")).to_have_text("<b>22</b>")
    scene.shot("tap")
    opens.click()
    expect(page.locator("tr.opened")).to_have_count(0)
    page.get_by_role("button", name="Stop").click()
    gateway.until(lambda: not taps.open)
    scene.close()


def test_what_comes_leaves_selections_and_the_keyboard_alone(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    scene.log_in()
    scene.turn("Queues")
    page = scene.page
    expect(scene.row("stuck")).to_be_visible()
    cell = "[...document.querySelectorAll('td')].find(one => one.textContent === 'stuck')"
    page.evaluate(f"getSelection().selectAllChildren({cell})")
    page.get_by_role("button", name="Peek stuck").focus()
    before = len(gateway.ask(lambda: gateway.gateway.host.queues["stuck"]))
    with page.expect_response(re.compile("api/v1/queues")):
        client = pika.BlockingConnection(pika.URLParameters(gateway.amqp_url))
        client.channel().basic_publish("", "stuck", b"more")
        client.close()
    expect(scene.row("stuck").get_by_role("cell").nth(2)).to_have_text(str(before + 1))
    assert page.evaluate("String(getSelection())") == "stuck"
    expect(page.get_by_role("button", name="Peek stuck")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    scene.close()


def test_a_gateway_that_does_not_answer_is_told(browser: Browser, gateway: Running) -> None:
    scene = Scene(browser, gateway)
    scene.log_in()
    expect(scene.page.get_by_text("ready", exact=True)).to_be_visible()
    scene.context.clear_cookies()
    expect(scene.page.get_by_role("button", name="Log in")).to_be_visible(timeout=15_000)
    scene.context.close()


def test_who_sees_one_virtual_host_has_the_views_of_virtual_hosts_alone(
    browser: Browser, gateway: Running
) -> None:
    scene = Scene(browser, gateway)
    scene.log_in("eve", "Queues")
    page = scene.page
    expect(page.get_by_text("virtual hosts shop")).to_be_visible()
    shown = page.get_by_role("navigation", name="Views").get_by_role("link")
    assert shown.all_text_contents() == ["Queues", "Exchanges", "Destinations", "Connections"]
    for view in ("Exchanges", "Destinations", "Connections", "Queues"):
        scene.turn(view)
    with page.expect_response(re.compile("api/v1/queues")) as asked:  # again and again, by itself
        pass
    assert asked.value.status == 200
    expect(scene.row("stuck")).to_have_count(0)
    for hidden in ("limits", "route?name=alarms", "link?name=erp", "listener?name=mqtt"):
        page.goto(f"{scene.at}/#/{hidden}")
        expect(page.get_by_role("heading", name="Queues", exact=True, level=2)).to_be_visible()
    for page_of, missing_of in (
        ("Queue stuck", "This queue does not exist."),
        ("Exchange bells", "This exchange does not exist."),
        ("Client press 7", "This client is not connected."),
    ):
        page.goto(f"{scene.at}/#/{PAGES[page_of]}")
        expect(page.get_by_text(missing_of)).to_be_visible()
        expect(page.get_by_role("heading", name="Session", exact=True)).to_have_count(0)
    scene.shot("of a virtual host")
    scene.close()
