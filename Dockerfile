# Small image of the gateway: compiled in one stage, run by an unprivileged user in the next, without a compiler or pip's cache.
#   docker build -t gateway:0.1.0 --build-arg REVISION="$(git rev-parse HEAD)" --build-arg CREATED="$(date -u +%FT%TZ)" .
#   docker run -p 1883:1883 -p 5672:5672 -p 8080:8080 -v "$PWD/gateway.yaml:/etc/gateway/gateway.yaml:ro" gateway:0.1.0
#
# A tag may refer to another image later. Pin the base by its digest for images that you publish:
#   docker buildx imagetools inspect python:3.11-slim --format '{{.Manifest.Digest}}'
#   docker build --build-arg BASE=python:3.11-slim@sha256:... .

ARG BASE=python:3.11-slim
FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
WORKDIR /source
RUN python -m venv /opt/build && python -m venv /opt/gateway
COPY requirements.lock pyproject.toml README.md LICENSE ./
# mypyc reads the types of all packages that the compiled modules import, also those of the extra `otel`. The image has these, and
# the packages that write the journal as Parquet. Versions and hashes are locked.
RUN sed '/^# What builds it/,$d' requirements.lock > running \
 && sed '/^# The data pipeline/,$d' requirements.lock > building \
 && /opt/build/bin/pip install --no-cache-dir --require-hashes -r building
COPY deploy/compile.py deploy/
COPY gateway gateway
COPY mappings mappings
RUN HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels . \
 && /opt/gateway/bin/pip install --no-cache-dir --require-hashes -r running \
 && /opt/gateway/bin/pip install --no-cache-dir --no-deps /wheels/*.whl \
 && /opt/gateway/bin/pip uninstall -y pip setuptools
# Bill of materials for scanners, in the CycloneDX format.
RUN /opt/build/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/gateway/sbom.cdx.json /opt/gateway/bin/python

FROM ${BASE}
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="gateway" \
      org.opencontainers.image.description="A protocol gateway between MQTT, AMQP 0-9-1 and AMQP/Fast" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.created="$CREATED" \
      org.opencontainers.image.base.name="docker.io/library/$BASE"
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
