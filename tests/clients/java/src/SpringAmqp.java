import com.rabbitmq.client.ShutdownSignalException;
import java.net.URI;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.springframework.amqp.AmqpException;
import org.springframework.amqp.core.AcknowledgeMode;
import org.springframework.amqp.core.Binding;
import org.springframework.amqp.core.BindingBuilder;
import org.springframework.amqp.core.Declarables;
import org.springframework.amqp.core.Message;
import org.springframework.amqp.core.MessageBuilder;
import org.springframework.amqp.core.MessageDeliveryMode;
import org.springframework.amqp.core.MessageListener;
import org.springframework.amqp.core.Queue;
import org.springframework.amqp.core.QueueBuilder;
import org.springframework.amqp.core.QueueInformation;
import org.springframework.amqp.core.ReturnedMessage;
import org.springframework.amqp.core.TopicExchange;
import org.springframework.amqp.rabbit.annotation.EnableRabbit;
import org.springframework.amqp.rabbit.annotation.RabbitListener;
import org.springframework.amqp.rabbit.config.RetryInterceptorBuilder;
import org.springframework.amqp.rabbit.config.SimpleRabbitListenerContainerFactory;
import org.springframework.amqp.rabbit.connection.CachingConnectionFactory;
import org.springframework.amqp.rabbit.connection.CachingConnectionFactory.ConfirmType;
import org.springframework.amqp.rabbit.connection.Connection;
import org.springframework.amqp.rabbit.connection.ConnectionListener;
import org.springframework.amqp.rabbit.connection.CorrelationData;
import org.springframework.amqp.rabbit.core.RabbitAdmin;
import org.springframework.amqp.rabbit.core.RabbitTemplate;
import org.springframework.amqp.rabbit.listener.DirectMessageListenerContainer;
import org.springframework.amqp.rabbit.listener.SimpleMessageListenerContainer;
import org.springframework.amqp.rabbit.retry.RejectAndDontRequeueRecoverer;
import org.springframework.amqp.rabbit.retry.RepublishMessageRecoverer;
import org.springframework.amqp.rabbit.transaction.RabbitTransactionManager;
import org.springframework.context.annotation.AnnotationConfigApplicationContext;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.messaging.handler.annotation.SendTo;
import org.springframework.transaction.support.TransactionTemplate;

/**
 * Spring AMQP as its reference has it: SpringAmqp AMQP-URL.
 *
 * <p>Listeners print nothing: what they heard goes into a queue, and the one who published prints it, so that the
 * lines have one order whoever answers.
 */
public final class SpringAmqp {
    static final int PATIENCE_SECS = 60;
    static final int ATTEMPTS = 3;
    static final BlockingQueue<String> HEARD = new LinkedBlockingQueue<>();
    static URI url;

    @Configuration
    @EnableRabbit
    static class Application {
        @Bean
        CachingConnectionFactory connections() {
            CachingConnectionFactory made = new CachingConnectionFactory(url);
            made.setPublisherConfirmType(ConfirmType.CORRELATED);
            made.setPublisherReturns(true);
            return made;
        }

        @Bean
        RabbitAdmin admin(CachingConnectionFactory connections) {
            return new RabbitAdmin(connections);
        }

        @Bean
        RabbitTemplate template(CachingConnectionFactory connections) {
            RabbitTemplate made = new RabbitTemplate(connections);
            made.setMandatory(true);
            made.setReplyTimeout(TimeUnit.SECONDS.toMillis(PATIENCE_SECS));
            return made;
        }

        @Bean
        Declarables topology() {
            TopicExchange events = new TopicExchange("spring.events");
            Queue orders = QueueBuilder.durable("spring.orders").maxPriority(5).build();
            Queue brief = QueueBuilder.nonDurable("spring.brief").autoDelete().build();
            Queue work =
                    QueueBuilder.durable("spring.work").quorum().deadLetterExchange("")
                            .deadLetterRoutingKey("spring.work.dead").build();
            return new Declarables(
                    events, orders, brief, work,
                    new Queue("spring.work.dead"), new Queue("spring.errors"), new Queue("spring.prices"),
                    new Queue("spring.quoted"), new Queue("spring.fragile"), new Queue("spring.ledger"),
                    BindingBuilder.bind(orders).to(events).with("order.#"),
                    BindingBuilder.bind(brief).to(events).with("*.brief"));
        }

        @Bean
        SimpleRabbitListenerContainerFactory rabbitListenerContainerFactory(CachingConnectionFactory connections) {
            SimpleRabbitListenerContainerFactory made = new SimpleRabbitListenerContainerFactory();
            made.setConnectionFactory(connections);
            made.setRecoveryInterval(200L);
            made.setReceiveTimeout(100L);
            return made;
        }

        @RabbitListener(queues = "spring.prices")
        public String price(String article) {
            return article + " costs " + article.length();
        }

        @RabbitListener(queues = "spring.brief")
        @SendTo("spring.quoted")
        public String brief(String text) {
            return "briefly: " + text;
        }

        /** Retried where it is, then rejected: its queue has dead letters. */
        @Bean
        SimpleMessageListenerContainer worker(CachingConnectionFactory connections) {
            AtomicInteger attempts = new AtomicInteger();
            SimpleMessageListenerContainer made = container(connections, "spring.work");
            made.setConcurrentConsumers(2);
            made.setPrefetchCount(1);
            made.setAdviceChain(RetryInterceptorBuilder.stateless().maxAttempts(ATTEMPTS).backOffOptions(1, 1, 1)
                    .recoverer(new RejectAndDontRequeueRecoverer()).build());
            made.setMessageListener((MessageListener) message -> {
                String text = text(message);
                int attempt = attempts.incrementAndGet();
                if (!text.equals("good") || attempt < ATTEMPTS) throw new IllegalStateException(text + " fails");
                attempts.set(0);
                HEARD.add("worked " + text + " after " + attempt);
            });
            return made;
        }

        /** Retried, then published elsewhere with its exception. */
        @Bean
        SimpleMessageListenerContainer fragile(CachingConnectionFactory connections, RabbitTemplate template) {
            SimpleMessageListenerContainer made = container(connections, "spring.fragile");
            made.setAdviceChain(RetryInterceptorBuilder.stateless().maxAttempts(2).backOffOptions(1, 1, 1)
                    .recoverer(new RepublishMessageRecoverer(template, "", "spring.errors")).build());
            made.setMessageListener((MessageListener) message -> {
                throw new IllegalStateException("wants none of it: " + "x".repeat(200_000));
            });
            return made;
        }

        /** Acknowledged by hand, by the other kind of container. */
        @Bean
        DirectMessageListenerContainer orders(CachingConnectionFactory connections) {
            DirectMessageListenerContainer made = new DirectMessageListenerContainer(connections);
            made.setQueueNames("spring.orders");
            made.setAcknowledgeMode(AcknowledgeMode.MANUAL);
            made.setConsumersPerQueue(1);
            made.setFailedDeclarationRetryInterval(200);
            made.setRecoveryInterval(200);
            made.setMessageListener((org.springframework.amqp.rabbit.listener.api.ChannelAwareMessageListener)
                    (message, channel) -> {
                        boolean again = message.getMessageProperties().isRedelivered();
                        long tag = message.getMessageProperties().getDeliveryTag();
                        if (text(message).equals("twice") && !again) {
                            channel.basicNack(tag, false, true);
                        } else {
                            channel.basicAck(tag, false);
                            HEARD.add("ordered " + text(message) + " " + again + " " + said(message));
                        }
                    });
            return made;
        }

        private static SimpleMessageListenerContainer container(CachingConnectionFactory connections, String queue) {
            SimpleMessageListenerContainer made = new SimpleMessageListenerContainer(connections);
            made.setQueueNames(queue);
            made.setRecoveryInterval(200);
            made.setReceiveTimeout(100);
            return made;
        }
    }

    static String text(Message message) {
        return new String(message.getBody());
    }

    static String said(Message message) {
        var properties = message.getMessageProperties();
        return properties.getReceivedExchange() + " " + properties.getReceivedRoutingKey() + " "
                + properties.getContentType() + " " + properties.getReceivedDeliveryMode() + " "
                + properties.getPriority() + " " + new java.util.TreeMap<>(withoutIds(properties.getHeaders()));
    }

    static Map<String, Object> withoutIds(Map<String, Object> headers) {
        var kept = new java.util.HashMap<>(headers);
        kept.keySet().removeIf(name -> name.startsWith("spring_"));
        return kept;
    }

    static void say(Object... words) {
        List<String> texts = new ArrayList<>();
        for (Object word : words) texts.add(String.valueOf(word));
        System.out.println(String.join(" ", texts));
    }

    static String heard(int count) throws InterruptedException {
        List<String> found = new ArrayList<>();
        for (int n = 0; n < count; n++) {
            String one = HEARD.poll(PATIENCE_SECS, TimeUnit.SECONDS);
            if (one == null) throw new IllegalStateException("heard only " + found);
            found.add(one);
        }
        Collections.sort(found);
        return String.join(", ", found);
    }

    static String confirmed(RabbitTemplate template, String exchange, String key, Object body) throws Exception {
        CorrelationData about = new CorrelationData(UUID.randomUUID().toString());
        template.convertAndSend(exchange, key, body, message -> {
            message.getMessageProperties().setHeader("n", 1L << 40);
            message.getMessageProperties().setHeader("list", List.of("a", 1, true));
            message.getMessageProperties().setPriority(3);
            return message;
        }, about);
        boolean acknowledged = about.getFuture().get(PATIENCE_SECS, TimeUnit.SECONDS).isAck();
        ReturnedMessage returned = about.getReturned();
        return acknowledged + (returned == null ? "" : " " + returned.getReplyCode() + " " + returned.getReplyText());
    }

    static void declared(RabbitAdmin admin) {
        for (String queue : List.of("spring.orders", "spring.work", "spring.quoted")) {
            QueueInformation found = admin.getQueueInfo(queue);
            say("queue", found.getName(), found.getMessageCount());
        }
        say("unknown queue", admin.getQueueInfo("spring.unknown"));
        say("exclusive", admin.declareQueue().getName().startsWith("spring.gen-"));
        try {
            admin.declareQueue(new Queue("spring.orders", true, false, false, Map.of("x-max-priority", 9)));
        } catch (AmqpException error) {
            say("redeclared", reason(error));
        }
    }

    static String reason(Throwable error) {
        for (; error != null; error = error.getCause()) {
            if (error instanceof ShutdownSignalException told && told.getReason() != null) {
                return told.getReason() instanceof com.rabbitmq.client.AMQP.Channel.Close closed
                        ? closed.getReplyCode() + " " + closed.getReplyText()
                        : told.getReason().protocolMethodName();
            }
        }
        return "nothing";
    }

    static void published(RabbitTemplate template) throws Exception {
        say("confirmed", confirmed(template, "spring.events", "order.new", "first"), heard(1));
        say("confirmed", confirmed(template, "", "spring.orders", "twice"), heard(1));
        say("confirmed", confirmed(template, "spring.events", "nobody.listens", "lost"));
        say("confirmed", confirmed(template, "spring.events", "order.again", "second"), heard(1));
    }

    /**
     * To an exchange that there is not. On connections of its own: the channel that this costs is closed by Spring some
     * time later, and what has been published on it meanwhile counts as refused.
     */
    static void astray() throws Exception {
        CachingConnectionFactory connections = new CachingConnectionFactory(url);
        connections.setPublisherConfirmType(ConfirmType.CORRELATED);
        try {
            say("confirmed", confirmed(new RabbitTemplate(connections), "spring.nowhere", "order.new", "lost"));
        } finally {
            connections.destroy();
        }
    }

    static void asked(RabbitTemplate template) throws Exception {
        say("answered", template.convertSendAndReceive("", "spring.prices", "bolt"));
        template.setUseTemporaryReplyQueues(true);
        say("answered", template.convertSendAndReceive("", "spring.prices", "a nut"));
        template.setUseTemporaryReplyQueues(false);
        say("confirmed", confirmed(template, "spring.events", "so.brief", "text"));
        say("sent on", text(template.receive("spring.quoted", TimeUnit.SECONDS.toMillis(PATIENCE_SECS))));
        say("nothing left", template.receive("spring.quoted"));
    }

    static void retried(RabbitTemplate template) throws Exception {
        long patience = TimeUnit.SECONDS.toMillis(PATIENCE_SECS);
        say("confirmed", confirmed(template, "", "spring.work", "good"), heard(1));
        say("confirmed", confirmed(template, "", "spring.work", "bad"));
        Message dead = template.receive("spring.work.dead", patience);
        Map<String, ?> death = dead.getMessageProperties().getXDeathHeader().get(0);
        say("dead", text(dead), death.get("queue"), death.get("reason"), death.get("count"), death.get("routing-keys"));
        say("confirmed", confirmed(template, "", "spring.fragile", "glass"));
        Message error = template.receive("spring.errors", patience);
        Map<String, Object> headers = error.getMessageProperties().getHeaders();
        int length = String.valueOf(headers.get("x-exception-message")).length();
        say("error", text(error), headers.get("x-original-routingKey"), "headers as long as a frame", length > 100_000);
    }

    /** Of a transaction that is rolled back nothing is published and nothing taken. */
    static void transacted() {
        CachingConnectionFactory connections = new CachingConnectionFactory(url);
        try {
            RabbitTemplate template = new RabbitTemplate(connections);
            template.setChannelTransacted(true);
            TransactionTemplate transaction = new TransactionTemplate(new RabbitTransactionManager(connections));
            for (boolean back : new boolean[] {true, false}) {
                transaction.executeWithoutResult(status -> {
                    template.convertAndSend("", "spring.ledger", "entry");
                    if (back) status.setRollbackOnly();
                });
                say("rolled back", back, new RabbitAdmin(connections).getQueueInfo("spring.ledger").getMessageCount());
            }
            for (boolean back : new boolean[] {true, false}) {
                transaction.executeWithoutResult(status -> {
                    say("took", text(template.receive("spring.ledger")));
                    if (back) status.setRollbackOnly();
                });
            }
            say("left", template.receive("spring.ledger"));
        } finally {
            connections.destroy();
        }
    }

    /** Confirms that are waited for, on one channel. */
    static void simplyConfirmed() {
        CachingConnectionFactory connections = new CachingConnectionFactory(url);
        connections.setPublisherConfirmType(ConfirmType.SIMPLE);
        try {
            RabbitTemplate template = new RabbitTemplate(connections);
            Boolean all = template.invoke(one -> {
                for (int n = 0; n < 100; n++) {
                    one.send("", "spring.ledger", MessageBuilder.withBody(new byte[1_000])
                            .setDeliveryMode(MessageDeliveryMode.NON_PERSISTENT).build());
                }
                return one.waitForConfirms(TimeUnit.SECONDS.toMillis(PATIENCE_SECS));
            });
            say("waited for confirms", all, new RabbitAdmin(connections).purgeQueue("spring.ledger"));
        } finally {
            connections.destroy();
        }
    }

    static void cutOff(CachingConnectionFactory connections, RabbitTemplate template, RabbitAdmin admin)
            throws Exception {
        CompletableFuture<Integer> closed = new CompletableFuture<>();
        CountDownLatch back = new CountDownLatch(1);
        connections.addConnectionListener(new ConnectionListener() {
            @Override
            public void onCreate(Connection connection) {
                if (closed.isDone()) back.countDown();
            }

            @Override
            public void onShutDown(ShutdownSignalException signal) {
                if (signal.getReason() instanceof com.rabbitmq.client.AMQP.Connection.Close told) {
                    closed.complete(told.getReplyCode());
                }
            }
        });
        connections.createConnection();
        System.out.println("cut me off");
        say("closed", closed.get(PATIENCE_SECS, TimeUnit.SECONDS));
        if (!back.await(PATIENCE_SECS, TimeUnit.SECONDS)) throw new IllegalStateException("not connected again");
        say("confirmed", confirmed(template, "spring.events", "order.late", "third"), heard(1));
        say("answered", template.convertSendAndReceive("", "spring.prices", "rivets"));
        say("confirmed", confirmed(template, "spring.events", "still.brief", "again"));
        say("sent on", text(template.receive("spring.quoted", TimeUnit.SECONDS.toMillis(PATIENCE_SECS))));
    }

    public static void main(String[] arguments) {
        url = URI.create(arguments[0]);
        try {
            all();
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1);
        }
        System.exit(0); // threads that connection factories leave behind go after a minute only
    }

    static void all() throws Exception {
        try (var context = new AnnotationConfigApplicationContext(Application.class)) {
            RabbitTemplate template = context.getBean(RabbitTemplate.class);
            RabbitAdmin admin = context.getBean(RabbitAdmin.class);
            declared(admin);
            published(template);
            astray();
            asked(template);
            retried(template);
            transacted();
            simplyConfirmed();
            cutOff(context.getBean(CachingConnectionFactory.class), template, admin);
            say("deleted", admin.deleteQueue("spring.ledger"), admin.deleteExchange("spring.events"));
        }
        say("done");
    }
}
