#!/usr/bin/env bash
# Build the Dockerfile without a Docker daemon and without a registry, and try the image; as root on Debian or Ubuntu. The base
# image is a Debian that debootstrap installs. Takes about 6 GB in a folder of /var/tmp, which is removed at the end.
#   tools/container_build.sh [options of `buildah build`, such as --build-arg TORCH=cu126]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq --yes --no-install-recommends buildah debootstrap >/dev/null

work=$(mktemp -d /var/tmp/container.XXXXXX)
trap 'rm -rf "$work"' EXIT
# Without overlayfs, as in many containers, each layer is a whole copy.
driver=$(grep -qw overlay /proc/filesystems && echo overlay || echo vfs)
image_tool=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver "$driver")
base=localhost/debian:bookworm

debootstrap --variant=minbase bookworm "$work/debian" >"$work/debootstrap.log" || { cat "$work/debootstrap.log"; exit 1; }
from_nothing=$("${image_tool[@]}" from scratch)
"${image_tool[@]}" add --quiet "$from_nothing" "$work/debian" /
"${image_tool[@]}" commit --quiet --rm "$from_nothing" "$base"
rm -rf "$work/debian"

"${image_tool[@]}" build --format docker --isolation chroot --pull-never --build-arg BASE="$base" "$@" --tag tunesmith .

# What `docker run` would start: the image's own user, folder and environment.
container=$("${image_tool[@]}" from --pull-never tunesmith)
inside() { "${image_tool[@]}" run --isolation chroot "$container" -- "$@"; }
test "$(inside id -u)" = 10001
inside tunesmith doctor
inside tunesmith train ppo --recipe scratch_ppo --steps 1
# shellcheck disable=SC2016  # the shell in the image expands it
inside sh -ec '
    tunesmith serve --host 0.0.0.0 --login --dir live &
    for _ in $(seq 60); do
        if python /opt/tunesmith/tools/container_health.py; then break; fi
        sleep 1
    done
    python /opt/tunesmith/tools/container_health.py
    kill $!
    wait $!'
echo "the image was built, and works as user 10001"
