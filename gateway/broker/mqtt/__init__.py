"""MQTT's namespace in the broker: subscriptions, sessions that outlive their connections, retained
messages.
"""
