import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.eclipse.paho.mqttv5.client.IMqttToken;
import org.eclipse.paho.mqttv5.client.MqttAsyncClient;
import org.eclipse.paho.mqttv5.client.MqttCallback;
import org.eclipse.paho.mqttv5.client.MqttConnectionOptions;
import org.eclipse.paho.mqttv5.client.MqttDisconnectResponse;
import org.eclipse.paho.mqttv5.client.persist.MemoryPersistence;
import org.eclipse.paho.mqttv5.common.MqttException;
import org.eclipse.paho.mqttv5.common.MqttMessage;
import org.eclipse.paho.mqttv5.common.MqttSubscription;
import org.eclipse.paho.mqttv5.common.packet.MqttProperties;
import org.eclipse.paho.mqttv5.common.packet.UserProperty;

/**
 * Eclipse Paho for Java, MQTT 5: Paho PORT.
 *
 * <p>Its clients take a third of a second to connect, and as long to disconnect: most are connected together at the
 * beginning, and left as they are.
 */
public final class Paho {
    static final String TOPIC = "paho/plant";
    static final long PATIENCE_MS = TimeUnit.SECONDS.toMillis(Lines.PATIENCE_SECS);
    static int port;

    /** A client whose messages go to `inbox`, and that tells when it has lost its connection. */
    static final class Client implements MqttCallback {
        final Lines.Inbox inbox = new Lines.Inbox();
        final BlockingQueue<MqttMessage> unacknowledged = new LinkedBlockingQueue<>();
        private final BlockingQueue<String> lost = new LinkedBlockingQueue<>();
        private final MqttAsyncClient client;
        private final MqttConnectionOptions options = new MqttConnectionOptions();

        Client(String id) throws MqttException {
            client = new MqttAsyncClient("tcp://127.0.0.1:" + port, id, new MemoryPersistence());
            client.setCallback(this);
            options.setCleanStart(true);
            // No topic aliases from the server: this client hands on what follows the first with an empty topic, for
            // it takes that for a new one (eclipse-paho/paho.mqtt.java#866). It uses them itself.
        }

        /** Returns whether there was a session. */
        boolean connect() throws MqttException {
            IMqttToken token = client.connect(options);
            token.waitForCompletion(PATIENCE_MS);
            return token.getSessionPresent();
        }

        List<Integer> subscribe(MqttSubscription subscription, int id) throws MqttException {
            MqttProperties properties = new MqttProperties();
            if (id > 0) properties.setSubscriptionIdentifier(id);
            IMqttToken token = client.subscribe(new MqttSubscription[] {subscription}, null, null, properties);
            token.waitForCompletion(PATIENCE_MS);
            List<Integer> codes = new ArrayList<>();
            for (int code : token.getReasonCodes()) codes.add(code);
            return codes;
        }

        List<Integer> subscribe(String filter, int qos) throws MqttException {
            return subscribe(new MqttSubscription(filter, qos), 0);
        }

        void publish(String topic, String body, int qos, boolean retained, MqttProperties properties)
                throws MqttException {
            client.publish(topic, new MqttMessage(Lines.octets(body), qos, retained, properties))
                    .waitForCompletion(PATIENCE_MS);
        }

        void publish(String topic, String body, int qos) throws MqttException {
            publish(topic, body, qos, false, new MqttProperties());
        }

        void awaitLoss() throws InterruptedException {
            if (lost.poll(Lines.PATIENCE_SECS, TimeUnit.SECONDS) == null) throw new IllegalStateException("not cut");
        }

        void acknowledge() throws Exception {
            MqttMessage message = unacknowledged.remove();
            client.messageArrivedComplete(message.getId(), message.getQos());
        }

        @Override
        public void messageArrived(String topic, MqttMessage message) {
            if (message.getQos() > 0) unacknowledged.add(message);
            inbox.add(shown(topic, message));
        }

        @Override
        public void disconnected(MqttDisconnectResponse response) {
            lost.add("lost");
        }

        @Override
        public void mqttErrorOccurred(MqttException error) {
            inbox.add("error " + error);
        }

        @Override
        public void deliveryComplete(IMqttToken token) {}

        @Override
        public void connectComplete(boolean again, String server) {}

        @Override
        public void authPacketArrived(int reason, MqttProperties properties) {}
    }

    static final Map<String, Client> CLIENTS = new LinkedHashMap<>();

    static void connectAll() throws MqttException {
        for (String name : "sender plain retained-0 retained-1 retained-2 late heir mortal one other last server asking"
                .concat(" slow before").split(" ")) {
            CLIENTS.put("paho-" + name, new Client("paho-" + name));
        }
        named("paho-slow").options.setReceiveMaximum(2);
        named("paho-slow").client.setManualAcks(true);
        MqttProperties properties = new MqttProperties();
        properties.setContentType("text/plain");
        properties.setUserProperties(List.of(new UserProperty("why", "will")));
        MqttConnectionOptions mortal = named("paho-mortal").options;
        mortal.setWillMessageProperties(properties);
        mortal.setWill(TOPIC + "/will", new MqttMessage(Lines.octets("gone"), 2, false, properties));
        List<IMqttToken> tokens = new ArrayList<>();
        for (Client one : CLIENTS.values()) tokens.add(one.client.connect(one.options));
        for (IMqttToken token : tokens) {
            token.waitForCompletion(PATIENCE_MS);
            Lines.say("connected", token.getSessionPresent());
        }
    }

    static Client named(String id) {
        return Objects.requireNonNull(CLIENTS.get(id), id);
    }

    static String shown(String topic, MqttMessage message) {
        MqttProperties properties = message.getProperties();
        List<String> words = new ArrayList<>();
        words.add(topic + " " + message.getQos() + " " + Lines.text(message.getPayload()));
        if (message.isRetained()) words.add("retained");
        if (message.isDuplicate()) words.add("again");
        if (properties.getContentType() != null) words.add("type " + properties.getContentType());
        if (properties.getResponseTopic() != null) words.add("to " + properties.getResponseTopic());
        if (properties.getCorrelationData() != null) words.add("for " + Lines.text(properties.getCorrelationData()));
        if (properties.getMessageExpiryInterval() != null) words.add("expires");
        if (properties.getPayloadFormat()) words.add("is text");
        for (UserProperty one : properties.getUserProperties()) words.add(one.getKey() + "=" + one.getValue());
        if (!properties.getSubscriptionIdentifiers().isEmpty()) words.add("by " + properties.getSubscriptionIdentifiers());
        return String.join(" ", words);
    }

    static void plain(Client sender) throws Exception {
        Client client = named("paho-plain");
        for (int granted = 0; granted < 3; granted++) {
            MqttSubscription wanted = new MqttSubscription(TOPIC + "/" + granted + "/+", granted);
            Lines.say("granted", client.subscribe(wanted, granted + 300));
            for (int qos = 0; qos < 3; qos++) {
                MqttProperties properties = new MqttProperties();
                properties.setContentType("text/plain");
                properties.setMessageExpiryInterval(100L);
                properties.setPayloadFormat(true);
                properties.setUserProperties(List.of(new UserProperty("a", "1"), new UserProperty("a", "")));
                sender.publish(TOPIC + "/" + granted + "/" + qos, "grün", qos, false, properties);
                Lines.say("heard", client.inbox.inOrder(1));
            }
        }
        for (int n = 0; n < 30; n++) sender.publish(TOPIC + "/2/alias-" + n % 6, "" + n, n % 3);
        Lines.say("aliased", client.inbox.sorted(30));
    }

    static void retained(Client sender) throws Exception {
        sender.publish(TOPIC + "/state", "on", 2, true, new MqttProperties());
        for (int handling = 0; handling < 3; handling++) {
            Client client = named("paho-retained-" + handling);
            for (int times = 0; times < 2; times++) {
                MqttSubscription wanted = new MqttSubscription(TOPIC + "/state", 1);
                wanted.setRetainHandling(handling);
                client.subscribe(wanted, 0);
                sender.publish(TOPIC + "/state", "mark", 1);
                List<String> found = new ArrayList<>();
                while (found.isEmpty() || !found.get(found.size() - 1).contains("mark")) {
                    found.addAll(client.inbox.inOrder(1));
                }
                Lines.say("retained", handling, times, found);
            }
            }
        sender.publish(TOPIC + "/state", "", 1, true, new MqttProperties());
        Client client = named("paho-late");
        client.subscribe(TOPIC + "/#", 1);
        sender.publish(TOPIC + "/state", "alone", 1);
        Lines.say("cleared", client.inbox.inOrder(1));
    }

    /** A connection that ends without a goodbye. */
    static void willed() throws Exception {
        Client client = named("paho-heir");
        client.subscribe(TOPIC + "/will", 2);
        named("paho-mortal").client.disconnectForcibly(0, 0, false);
        Lines.say("will", client.inbox.inOrder(1));
    }

    static void shared(Client sender) throws Exception {
        Lines.Inbox all = new Lines.Inbox();
        List<Client> team = List.of(named("paho-one"), named("paho-other"));
        for (Client client : team) client.subscribe("$share/team/" + TOPIC + "/work/+", 2);
        for (int n = 0; n < 20; n++) sender.publish(TOPIC + "/work/" + n, "", 1 + n % 2);
        Client last = named("paho-last");
        last.subscribe(TOPIC + "/last", 0);
        while (team.get(0).inbox.size() + team.get(1).inbox.size() < 20) {
            sender.publish(TOPIC + "/last", "", 0); // its way there and back, to look again afterwards
            last.inbox.inOrder(1);
        }
        for (Client client : team) {
            for (String one : client.inbox.inOrder(client.inbox.size())) all.add(one);
        }
        Lines.say("shared", all.sorted(20));
    }

    static void asked() throws Exception {
        Client server = named("paho-server");
        Client client = named("paho-asking");
        server.subscribe(TOPIC + "/questions", 2);
        MqttSubscription everything = new MqttSubscription(TOPIC + "/#", 2);
        everything.setNoLocal(true);
        client.subscribe(everything, 0);
        MqttProperties question = new MqttProperties();
        question.setResponseTopic(TOPIC + "/answers");
        question.setCorrelationData(Lines.octets("id"));
        client.publish(TOPIC + "/questions", "why", 2, false, question);
        Lines.say("asked", server.inbox.inOrder(1));
        MqttProperties asked = server.unacknowledged.remove().getProperties();
        MqttProperties answer = new MqttProperties();
        answer.setCorrelationData(asked.getCorrelationData());
        server.publish(asked.getResponseTopic(), "because", 1, false, answer);
        Lines.say("answered", client.inbox.inOrder(1));
    }

    /** Of what waits for acknowledgement there are never more than it said. */
    static void held(Client sender) throws Exception {
        Client client = named("paho-slow");
        client.subscribe(TOPIC + "/flood/+", 1);
        for (int n = 0; n < 6; n++) sender.publish(TOPIC + "/flood/" + n, "", 1);
        client.subscribe(TOPIC + "/after/all/that/went/before", 0);
        Lines.say("held back", client.inbox.inOrder(2), client.inbox.size());
        for (int n = 0; n < 4; n++) {
            client.acknowledge();
            Lines.say("then", client.inbox.inOrder(1)); // Mosquitto 2.0 sends one more at times
        }
    }

    /** What was heard and not acknowledged comes again, and what came meanwhile after it. */
    static void resumed() throws Exception {
        Client client = new Client("paho-resumed");
        client.options.setCleanStart(false);
        client.options.setSessionExpiryInterval(3_600L);
        client.client.setManualAcks(true);
        Lines.say("session", client.connect());
        client.subscribe(TOPIC + "/kept/+", 1);
        Client before = named("paho-before");
        for (int n = 0; n < 2; n++) before.publish(TOPIC + "/kept/" + n, "", 1);
        Lines.say("heard", client.inbox.inOrder(2));
        client.unacknowledged.clear();
        System.out.println("cut me off");
        client.awaitLoss();
        Client sender = new Client("paho-meanwhile"); // the others were cut off as well
        sender.connect();
        for (int n = 2; n < 5; n++) sender.publish(TOPIC + "/kept/" + n, "", 1 + n % 2);
        Lines.say("session", client.connect(), client.inbox.inOrder(5));
        while (!client.unacknowledged.isEmpty()) client.acknowledge();
    }

    static void all() throws Exception {
        connectAll();
        Client sender = named("paho-sender");
        plain(sender);
        retained(sender);
        willed();
        shared(sender);
        asked();
        held(sender);
        resumed();
        Lines.say("done");
    }

    public static void main(String[] arguments) {
        port = Integer.parseInt(arguments[0]);
        try {
            all();
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1);
        }
        System.exit(0);
    }
}
