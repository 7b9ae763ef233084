#!/bin/sh
# Build the container image without Docker and without a registry.
#
#   deploy/image.sh [FOLDER]     FOLDER (default: build/image) keeps the image store and the base between runs.
#
# buildah builds the Dockerfile as it is. The base that its FROM lines name is made here from Debian's packages: debootstrap
# installs Debian's own Python 3.11, which takes the place of the one in `python:3.11-slim`. Use `docker build` for images that
# you publish; this script proves that the Dockerfile works where no registry can be reached.
#
# Needs root, buildah and debootstrap. Prints the name of the image.
set -eu
cd "$(dirname "$0")/.."
folder=$(mkdir -p "${1:-build/image}" && cd "${1:-build/image}" && pwd)
base=$(sed -n 's/^ARG BASE=//p' Dockerfile)
name="localhost/gateway:$(sed -n 's/^__version__.*"\(.*\)"/\1/p' gateway/__init__.py)"

[ "$(sed -n 's/^FROM \([^ ]*\).*/\1/p' Dockerfile | sort -u)" = '${BASE}' ] || { echo "Dockerfile: not all FROM lines name \${BASE}" >&2; exit 2; }
for program in buildah debootstrap; do
    command -v "$program" >/dev/null || { echo "$program is missing: apt-get install buildah debootstrap" >&2; exit 2; }
done

store() {
    buildah --root "$folder/store" --runroot "$folder/run" --storage-driver vfs "$@"
}

# Debian's archive as this machine reaches it, so that a mirror or a proxy of its own is used here too.
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")

if ! store inspect --type image "docker.io/library/$base" >/dev/null 2>&1; then
    rm -rf "$folder/base"
    debootstrap --variant=minbase --include=ca-certificates,python3-dev,python3-venv "$suite" "$folder/base" "$mirror" >"$folder/base.log" 2>&1 ||
        { tail -n 20 "$folder/base.log" >&2; exit 1; }
    rm -rf "$folder/base/var/cache/apt/archives" "$folder/base/var/lib/apt/lists"
    ln -sf /usr/bin/python3 "$folder/base/usr/local/bin/python"
    ln -sf /usr/bin/python3 "$folder/base/usr/local/bin/python3"
    container=$(store from scratch)
    store add --quiet "$container" "$folder/base" / >/dev/null
    store config --cmd python3 "$container"
    store commit --quiet --format docker "$container" "docker.io/library/$base" >/dev/null
    store rm "$container" >/dev/null
    rm -rf "$folder/base"
fi

# How this machine reaches Debian's archive and PyPI. None of it stays in the image.
set --
for path in /etc/apt /etc/pip.conf /etc/ssl/certs /usr/local/share/ca-certificates; do
    [ -e "$path" ] && set -- "$@" --volume "$path:$path:ro"
done
store build --isolation chroot --format docker --pull-never --layers=false "$@" \
    --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo unknown)" --build-arg CREATED="$(date -u +%FT%TZ)" \
    --tag "$name" . >"$folder/build.log" 2>&1 || { tail -n 40 "$folder/build.log" >&2; exit 1; }

echo "$name"
