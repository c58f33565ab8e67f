#!/usr/bin/env bash
# Steps of the Dockerfile that need root on Debian or Ubuntu; .ci/run takes its packages from here too.
#   tools/container.sh packages [development]  what Tunesmith needs of the system, and what its tests and tools need beside that
#   tools/container.sh user                    the user `tunesmith` (10001) and its folder /data
set -euo pipefail

# g++ compiles the C++ kernels at first use, Triton its launchers with Python's headers; make and venv make the environment.
runtime=(ca-certificates g++ make python3 python3-dev python3-venv)
# The Python tool of a policy runs its code in bubblewrap. The report is opened in a browser, which needs a font; pages are
# tested behind nginx, with a certificate of openssl; votes are kept in PostgreSQL too.
development=(bubblewrap chromium fonts-dejavu-core git nginx-light openssl postgresql)

packages() {
    export DEBIAN_FRONTEND=noninteractive
    local wanted=("${runtime[@]}")
    if [ "${1:-}" = development ]; then wanted+=("${development[@]}"); fi
    apt-get update -qq
    apt-get install -qq --yes --no-install-recommends "${wanted[@]}" >/dev/null
}

user() {
    useradd --uid 10001 --user-group --home-dir /data --create-home --shell /bin/bash tunesmith
}

case "${1:-}" in
packages) packages "${2:-}" ;;
user) user ;;
*)
    echo "usage: tools/container.sh packages [development] | user" >&2
    exit 2
    ;;
esac
