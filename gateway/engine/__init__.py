"""The shared engine: many gateways that serve the same MQTT clients over one RabbitMQ cluster. Each is a
stateless door: topics are a topic exchange, what is retained is a log that all of them follow, and who owns a
client identifier is what that log says last. Replicas say nothing to each other but through the cluster.
"""
