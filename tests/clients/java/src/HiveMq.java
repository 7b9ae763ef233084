import com.hivemq.client.mqtt.MqttGlobalPublishFilter;
import com.hivemq.client.mqtt.datatypes.MqttQos;
import com.hivemq.client.mqtt.mqtt5.Mqtt5BlockingClient;
import com.hivemq.client.mqtt.mqtt5.Mqtt5Client;
import com.hivemq.client.mqtt.mqtt5.Mqtt5ClientBuilder;
import com.hivemq.client.mqtt.mqtt5.datatypes.Mqtt5UserProperties;
import com.hivemq.client.mqtt.mqtt5.exceptions.Mqtt5UnsubAckException;
import com.hivemq.client.mqtt.mqtt5.message.connect.connack.Mqtt5ConnAck;
import com.hivemq.client.mqtt.mqtt5.message.disconnect.Mqtt5DisconnectReasonCode;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5Publish;
import com.hivemq.client.mqtt.mqtt5.message.publish.Mqtt5PublishResult;
import com.hivemq.client.mqtt.mqtt5.message.subscribe.Mqtt5RetainHandling;
import java.util.ArrayList;
import java.util.List;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/** HiveMQ's client, MQTT 5: HiveMq PORT. */
public final class HiveMq {
    static final String TOPIC = "hive/plant";
    static int port;

    static Mqtt5ClientBuilder named(String id) {
        return Mqtt5Client.builder().identifier(id).serverHost("127.0.0.1").serverPort(port);
    }

    /** Connected, with a session of an hour; what it hears goes to `inbox`. */
    static Mqtt5BlockingClient listening(Mqtt5ClientBuilder builder, Lines.Inbox inbox) {
        Mqtt5BlockingClient made = builder.buildBlocking();
        made.toAsync().publishes(MqttGlobalPublishFilter.ALL, publish -> inbox.add(shown(publish)));
        connected(made);
        return made;
    }

    static Mqtt5ConnAck connected(Mqtt5BlockingClient client) {
        return client.connectWith().cleanStart(false).sessionExpiryInterval(3_600).keepAlive(30)
                .restrictions().topicAliasMaximum(4).sendTopicAliasMaximum(4).applyRestrictions().send();
    }

    static void subscribed(Mqtt5BlockingClient client, String filter, MqttQos qos) {
        client.subscribeWith().topicFilter(filter).qos(qos).send();
    }

    static String shown(Mqtt5Publish publish) {
        List<String> words = new ArrayList<>();
        words.add(publish.getTopic() + " " + publish.getQos().getCode() + " " + Lines.text(publish.getPayloadAsBytes()));
        if (publish.isRetain()) words.add("retained");
        publish.getContentType().ifPresent(type -> words.add("type " + type));
        publish.getPayloadFormatIndicator().ifPresent(format -> words.add("format " + format));
        publish.getResponseTopic().ifPresent(topic -> words.add("to " + topic));
        publish.getCorrelationData().ifPresent(octets -> words.add("for " + Lines.text(octets).replace("\0", "(nul)")));
        publish.getMessageExpiryInterval().ifPresent(secs -> words.add("expires"));
        publish.getUserProperties().asList().forEach(one -> words.add(one.getName() + "=" + one.getValue()));
        return String.join(" ", words);
    }

    static void plain(Mqtt5BlockingClient sender) throws Exception {
        Lines.Inbox inbox = new Lines.Inbox();
        Mqtt5BlockingClient client = listening(named("hive-plain"), inbox);
        var subAck = client.subscribeWith()
                .addSubscription().topicFilter(TOPIC + "/0/#").qos(MqttQos.AT_MOST_ONCE).applySubscription()
                .addSubscription().topicFilter(TOPIC + "/1/+").qos(MqttQos.AT_LEAST_ONCE).applySubscription()
                .addSubscription().topicFilter(TOPIC + "/2/+").qos(MqttQos.EXACTLY_ONCE).applySubscription()
                .send();
        Lines.say("granted", subAck.getReasonCodes());
        for (MqttQos granted : MqttQos.values()) {
            for (MqttQos qos : MqttQos.values()) {
                sender.publishWith().topic(TOPIC + "/" + granted.getCode() + "/" + qos.getCode()).qos(qos)
                        .payload(Lines.octets("grün")).contentType("text/plain").messageExpiryInterval(100)
                        .payloadFormatIndicator(com.hivemq.client.mqtt.mqtt5.message.publish
                                .Mqtt5PayloadFormatIndicator.UTF_8)
                        .responseTopic("hive/answers").correlationData(Lines.octets("c" + qos.getCode()))
                        .userProperties(Mqtt5UserProperties.builder().add("a", "1").add("b", "").add("a", "2").build())
                        .send();
                Lines.say("heard", inbox.inOrder(1));
            }
        }
        sender.publishWith().topic(TOPIC + "/2/empty").qos(MqttQos.EXACTLY_ONCE).send();
        Lines.say("heard", inbox.inOrder(1));
        for (String filter : List.of(TOPIC + "/0/#", TOPIC + "/0/#")) {
            try {
                Lines.say("unsubscribed", client.unsubscribeWith().topicFilter(filter).send().getReasonCodes());
            } catch (Mqtt5UnsubAckException error) {
                Lines.say("not unsubscribed", error.getMqttMessage().getReasonCodes());
            }
        }
        for (MqttQos qos : List.of(MqttQos.AT_LEAST_ONCE, MqttQos.EXACTLY_ONCE)) {
            Mqtt5PublishResult result = sender.publishWith().topic(TOPIC + "/0/nobody").qos(qos).send();
            Lines.say("nobody hears", result instanceof Mqtt5PublishResult.Mqtt5Qos1Result one
                    ? one.getPubAck().getReasonCode()
                    : ((Mqtt5PublishResult.Mqtt5Qos2Result) result).getPubRec().getReasonCode());
        }
        client.disconnectWith().sessionExpiryInterval(0).send();
    }

    static void aliased(Mqtt5BlockingClient sender) throws Exception {
        Lines.Inbox inbox = new Lines.Inbox();
        Mqtt5BlockingClient client = listening(named("hive-aliases"), inbox);
        subscribed(client, TOPIC + "/alias/#", MqttQos.AT_LEAST_ONCE);
        for (int n = 0; n < 30; n++) {
            sender.publishWith().topic(TOPIC + "/alias/" + n % 6).qos(MqttQos.fromCode(n % 3))
                    .payload(Lines.octets("" + n)).send();
        }
        Lines.say("aliased", inbox.sorted(30));
        client.disconnectWith().sessionExpiryInterval(0).send();
    }

    static void retained(Mqtt5BlockingClient sender) throws Exception {
        String topic = TOPIC + "/state";
        sender.publishWith().topic(topic).qos(MqttQos.AT_LEAST_ONCE).payload(Lines.octets("on")).retain(true).send();
        Lines.Inbox inbox = new Lines.Inbox();
        Mqtt5BlockingClient client = listening(named("hive-retained"), inbox);
        for (Mqtt5RetainHandling handling : Mqtt5RetainHandling.values()) {
            for (int times = 0; times < 2; times++) {
                client.subscribeWith().topicFilter(topic).qos(MqttQos.EXACTLY_ONCE).retainHandling(handling)
                        .retainAsPublished(handling == Mqtt5RetainHandling.SEND).send();
                sender.publishWith().topic(topic).qos(MqttQos.AT_LEAST_ONCE).payload(Lines.octets("mark")).send();
                List<String> found = new ArrayList<>();
                while (found.isEmpty() || !found.get(found.size() - 1).contains("mark")) {
                    found.addAll(inbox.inOrder(1));
                }
                Lines.say("retained", handling, times, found);
            }
            client.unsubscribeWith().topicFilter(topic).send();
        }
        client.subscribeWith().topicFilter(topic).qos(MqttQos.AT_LEAST_ONCE).retainAsPublished(true).send();
        sender.publishWith().topic(topic).qos(MqttQos.AT_LEAST_ONCE).retain(true).send();
        Lines.say("cleared", inbox.inOrder(2));
        client.disconnectWith().sessionExpiryInterval(0).send();
        client = listening(named("hive-retained-later"), inbox);
        subscribed(client, TOPIC + "/#", MqttQos.AT_LEAST_ONCE);
        sender.publishWith().topic(topic).qos(MqttQos.AT_LEAST_ONCE).payload(Lines.octets("alone")).send();
        Lines.say("after it", inbox.inOrder(1));
        client.disconnectWith().sessionExpiryInterval(0).send();
    }

    static void willed() throws Exception {
        Lines.Inbox inbox = new Lines.Inbox();
        Mqtt5BlockingClient client = listening(named("hive-heir"), inbox);
        subscribed(client, TOPIC + "/wills/#", MqttQos.EXACTLY_ONCE);
        for (boolean told : new boolean[] {false, true}) {
            Mqtt5BlockingClient mortal = named("hive-mortal-" + told).willPublish()
                    .topic(TOPIC + "/wills/" + told).qos(MqttQos.EXACTLY_ONCE).payload(Lines.octets("gone"))
                    .contentType("text/plain").userProperties().add("why", "will").applyUserProperties()
                    .applyWillPublish().buildBlocking();
            mortal.connect();
            mortal.disconnectWith().reasonCode(told
                    ? Mqtt5DisconnectReasonCode.DISCONNECT_WITH_WILL_MESSAGE
                    : Mqtt5DisconnectReasonCode.NORMAL_DISCONNECTION).send();
        }
        Lines.say("will", inbox.inOrder(1));
        client.disconnectWith().sessionExpiryInterval(0).send();
    }

    static void shared(Mqtt5BlockingClient sender) throws Exception {
        Lines.Inbox inbox = new Lines.Inbox();
        List<Mqtt5BlockingClient> clients = new ArrayList<>();
        for (int n = 0; n < 2; n++) {
            clients.add(listening(named("hive-shared-" + n), inbox));
            subscribed(clients.get(n), "$share/team/" + TOPIC + "/work/+", MqttQos.EXACTLY_ONCE);
        }
        for (int n = 0; n < 20; n++) {
            sender.publishWith().topic(TOPIC + "/work/" + n).qos(MqttQos.fromCode(1 + n % 2)).send();
        }
        Lines.say("shared", inbox.sorted(20), inbox.size());
        for (Mqtt5BlockingClient client : clients) client.disconnectWith().sessionExpiryInterval(0).send();
    }

    static void asked() throws Exception {
        Mqtt5BlockingClient server = named("hive-server").buildBlocking();
        server.toAsync().publishes(MqttGlobalPublishFilter.ALL, publish -> server.toAsync().publishWith()
                .topic(publish.getResponseTopic().orElseThrow()).qos(publish.getQos())
                .correlationData(publish.getCorrelationData().orElseThrow())
                .payload(Lines.octets("re: " + Lines.text(publish.getPayloadAsBytes()))).send());
        server.connect();
        subscribed(server, TOPIC + "/questions", MqttQos.EXACTLY_ONCE);
        Lines.Inbox inbox = new Lines.Inbox();
        Mqtt5BlockingClient client = listening(named("hive-asking"), inbox);
        client.subscribeWith().topicFilter(TOPIC + "/#").qos(MqttQos.EXACTLY_ONCE).noLocal(true).send();
        client.publishWith().topic(TOPIC + "/questions").qos(MqttQos.EXACTLY_ONCE).payload(Lines.octets("why"))
                .responseTopic(TOPIC + "/answers").correlationData(new byte[] {'i', 'd', 0}).send();
        Lines.say("answered", inbox.inOrder(1));
        server.disconnect();
        client.disconnectWith().sessionExpiryInterval(0).send();
    }

    /**
     * Of what waits for acknowledgement there are never more than it said. Whether QoS 0 goes past is the server's
     * to choose (4.9), so that it is heard of last.
     */
    static void held(Mqtt5BlockingClient sender) throws Exception {
        Queue<Mqtt5Publish> unacknowledged = new ConcurrentLinkedQueue<>();
        Lines.Inbox inbox = new Lines.Inbox();
        Lines.Inbox unheld = new Lines.Inbox();
        Mqtt5BlockingClient client = named("hive-slow").buildBlocking();
        client.toAsync().publishes(MqttGlobalPublishFilter.ALL, publish -> {
            boolean held = publish.getQos() != MqttQos.AT_MOST_ONCE;
            if (held) unacknowledged.add(publish);
            (held ? inbox : unheld).add(shown(publish));
        }, true);
        client.connectWith().restrictions().receiveMaximum(2).applyRestrictions().send();
        subscribed(client, TOPIC + "/flood/+", MqttQos.EXACTLY_ONCE);
        for (int n = 0; n < 6; n++) {
            sender.publishWith().topic(TOPIC + "/flood/" + n).qos(MqttQos.fromCode(1 + n % 2)).send();
        }
        sender.publishWith().topic(TOPIC + "/flood/past").qos(MqttQos.AT_MOST_ONCE).send();
        subscribed(client, TOPIC + "/after/all/that/went/before", MqttQos.AT_MOST_ONCE);
        Lines.say("held back", inbox.inOrder(2), inbox.size());
        for (int n = 0; n < 4; n++) {
            unacknowledged.remove().acknowledge();
            Lines.say("then", inbox.inOrder(1), inbox.size());
        }
        unacknowledged.forEach(Mqtt5Publish::acknowledge);
        Lines.say("flowed", unheld.inOrder(1));
        client.disconnect();
    }

    /** A message larger than a client takes is not for it. */
    static void tooLarge(Mqtt5BlockingClient sender) throws Exception {
        Lines.Inbox inbox = new Lines.Inbox();
        Mqtt5BlockingClient client = named("hive-small").buildBlocking();
        client.toAsync().publishes(MqttGlobalPublishFilter.ALL, publish -> inbox.add(shown(publish)));
        client.connectWith().restrictions().maximumPacketSize(200).applyRestrictions().send();
        subscribed(client, TOPIC + "/sizes", MqttQos.AT_LEAST_ONCE);
        for (int size : new int[] {1, 1_000, 2}) {
            sender.publishWith().topic(TOPIC + "/sizes").qos(MqttQos.AT_LEAST_ONCE)
                    .payload(Lines.octets("x".repeat(size))).send();
        }
        Lines.say("small enough", inbox.inOrder(2));
        client.disconnect();
    }

    static void resumed() throws Exception {
        Lines.Inbox inbox = new Lines.Inbox();
        CountDownLatch lost = new CountDownLatch(1);
        CountDownLatch back = new CountDownLatch(1);
        Mqtt5BlockingClient client = listening(named("hive-resumed")
                .automaticReconnect().initialDelay(50, TimeUnit.MILLISECONDS).maxDelay(200, TimeUnit.MILLISECONDS)
                .applyAutomaticReconnect()
                .addDisconnectedListener(context -> lost.countDown())
                .addConnectedListener(context -> {
                    if (lost.getCount() == 0) back.countDown();
                }), inbox);
        subscribed(client, TOPIC + "/kept/+", MqttQos.EXACTLY_ONCE);
        System.out.println("cut me off");
        await(lost);
        await(back);
        Mqtt5BlockingClient sender = named("hive-late").buildBlocking(); // the other was cut off as well
        sender.connect();
        sender.publishWith().topic(TOPIC + "/kept/live").qos(MqttQos.EXACTLY_ONCE).send();
        Lines.say("cut off, and heard", inbox.inOrder(1));

        client.disconnectWith().send();
        for (int n = 0; n < 6; n++) {
            sender.publishWith().topic(TOPIC + "/kept/" + n).qos(MqttQos.fromCode(1 + n % 2)).send();
        }
        Lines.say("session", connected(client).isSessionPresent(), inbox.inOrder(6));
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(Lines.PATIENCE_SECS);
        boolean present = true;
        while (present && System.nanoTime() < deadline) { // a CONNECT may overtake the DISCONNECT before it
            client.disconnectWith().sessionExpiryInterval(0).send();
            present = connected(client).isSessionPresent();
        }
        Lines.say("session in the end", present);
        client.disconnectWith().sessionExpiryInterval(0).send();
        sender.disconnect();
    }

    static void await(CountDownLatch latch) throws InterruptedException {
        if (!latch.await(Lines.PATIENCE_SECS, TimeUnit.SECONDS)) throw new IllegalStateException("it did not come");
    }

    public static void main(String[] arguments) {
        port = Integer.parseInt(arguments[0]);
        try {
            all();
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1);
        }
        System.exit(0); // its event loops are no daemons, and end some time later
    }

    static void all() throws Exception {
        Mqtt5BlockingClient sender = named("hive-sender").buildBlocking();
        Mqtt5ConnAck connAck = connected(sender);
        Lines.say("connected", connAck.getReasonCode(), connAck.isSessionPresent());
        plain(sender);
        aliased(sender);
        retained(sender);
        willed();
        shared(sender);
        asked();
        held(sender);
        tooLarge(sender);
        resumed();
        Lines.say("done");
    }
}
