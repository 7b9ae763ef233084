#!/bin/sh
# Installs the programs that the tests talk to or run on: Debian's brokers, command line clients and shells, Prometheus'
# promtool, Chromium, the Java that Spark and Java's clients need, and the usual Node clients into .node/. Does nothing when they are there. Without
# the right to install, says what is missing; the tests that need it are skipped then, or fail under CI=true.
set -u
cd "$(dirname "$0")/../.."

NODE_PACKAGES="mqtt@5.16.0 amqplib@2.3.1 rabbitmq-client@5.0.8 @cloudamqp/amqp-client@4.1.1"

missing_debian() {
    for pair in mosquitto:mosquitto mosquitto_pub:mosquitto-clients amqp-publish:amqp-tools node:nodejs npm:npm \
        psql:postgresql java:default-jre-headless javac:default-jdk-headless mvn:maven promtool:prometheus \
        chromium:chromium zsh:zsh fish:fish buildah:buildah debootstrap:debootstrap; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || [ -x "/usr/sbin/${pair%%:*}" ] || echo "${pair#*:}"
    done
    ls /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server >/dev/null 2>&1 || echo rabbitmq-server
}

wanted=$(missing_debian)
if [ -n "$wanted" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    # Debian starts a service as it installs it; run level 1 tells its scripts not to. The tests start their own.
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
    # shellcheck disable=SC2086
    apt-get install -y --no-install-recommends $wanted >/dev/null 2>&1 ||
        { apt-get update >/dev/null 2>&1 && apt-get install -y --no-install-recommends $wanted >/dev/null; }
    wanted=$(missing_debian)
fi

if [ ! -d .node/node_modules/mqtt ] || [ ! -d .node/node_modules/amqplib ] ||
    [ ! -d .node/node_modules/rabbitmq-client ] || [ ! -d .node/node_modules/@cloudamqp/amqp-client ]; then
    if command -v npm >/dev/null 2>&1; then
        mkdir -p .node
        # shellcheck disable=SC2086
        npm install --prefix .node --no-save --no-audit --no-fund --loglevel=error $NODE_PACKAGES >/dev/null ||
            wanted="$wanted node-clients"
    fi
fi

if [ -n "$wanted" ]; then
    echo "not installed, and needed by some tests:" $wanted >&2
    [ "${CI:-}" != true ] || exit 1
fi
