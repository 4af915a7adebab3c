#!/usr/bin/env bash
# Builds the image described in docker/Dockerfile.
set -euo pipefail

TAG=ya-fsdp:latest
BASE_IMAGE=

usage() {
    cat <<'TEXT'
Usage: docker/build.sh [--tag NAME[:TAG]] [--base IMAGE] [--help]

  --tag NAME[:TAG]  name of the image (ya-fsdp:latest)
  --base IMAGE      image to start from, with torch 2.11 or newer (the one named in docker/Dockerfile)
TEXT
}

fail() {
    echo "docker/build.sh: $1" >&2
    exit "${2:-1}"
}

wrong_use() {
    usage >&2
    fail "$1" 2
}

while [ $# -gt 0 ]; do
    case "$1" in
        --help)
            usage
            exit 0
            ;;
        --tag | --base)
            [ $# -ge 2 ] || wrong_use "$1 needs a value"
            [[ "$2" =~ ^[A-Za-z0-9][A-Za-z0-9._/:@-]*$ ]] || wrong_use "$1: '$2' is not the name of an image"
            if [ "$1" = --tag ]; then TAG=$2; else BASE_IMAGE=$2; fi
            shift 2
            ;;
        *)
            wrong_use "unknown argument '$1'"
            ;;
    esac
done

command -v docker > /dev/null || fail "docker is not installed, or not in PATH"
docker info > /dev/null 2>&1 || fail "docker does not answer: is its daemon running, and may you use it?"

cd "$(dirname "${BASH_SOURCE[0]}")/.."
arguments=(--file docker/Dockerfile --tag "$TAG")
if [ -n "$BASE_IMAGE" ]; then
    arguments+=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
fi
exec docker build "${arguments[@]}" .
