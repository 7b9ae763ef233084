# The gateway as a small image: built in one stage, run by an ordinary user in the next, without a compiler or pip's cache.
#   docker build -t gateway .
#   docker run -p 1883:1883 -p 5672:5672 -p 8080:8080 -v "$PWD/gateway.yaml:/etc/gateway/gateway.yaml:ro" gateway

FROM python:3.11-slim AS build
WORKDIR /source
RUN python -m venv /opt/gateway
COPY requirements.lock pyproject.toml README.md LICENSE ./
# hatchling first, at the locked version: the build below then needs nothing that the lock does not name.
RUN /opt/gateway/bin/pip install --no-cache-dir -c requirements.lock hatchling
COPY gateway gateway
COPY mappings mappings
RUN /opt/gateway/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels . \
 && rm -rf /opt/gateway && python -m venv /opt/gateway \
 && /opt/gateway/bin/pip install --no-cache-dir -c requirements.lock /wheels/*.whl \
 && /opt/gateway/bin/pip uninstall -y pip setuptools

FROM python:3.11-slim
LABEL org.opencontainers.image.title="gateway" \
      org.opencontainers.image.description="A protocol gateway between MQTT, AMQP 0-9-1 and AMQP/Fast" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 gateway \
 && useradd --uid 10001 --gid gateway --no-create-home --home-dir /var/lib/gateway gateway \
 && install -d -o gateway -g gateway /var/lib/gateway /etc/gateway
COPY --from=build /opt/gateway /opt/gateway
ENV PATH=/opt/gateway/bin:$PATH PYTHONUNBUFFERED=1 GATEWAY_STORE__PATH=/var/lib/gateway
USER 10001:10001
WORKDIR /etc/gateway
VOLUME /var/lib/gateway
EXPOSE 1883 3018 5672 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/livez', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["gateway"]
CMD ["run"]
