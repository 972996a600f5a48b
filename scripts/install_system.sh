#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing of the system packages (Debian). Asks no package server when nothing is missing.
#   scripts/install_system.sh [PYTHON]          all that a checkout needs
#   scripts/install_system.sh --for plugin [PYTHON]     what an installed devproxy needs for a torch plugin
#   scripts/install_system.sh --check build     says what a wheel's build lacks, installs nothing; exit code 2
set -eu
only=
check=
case ${1:-} in
  --check) check=1 only=${2:?} && set -- "${PYTHON:-python3}" ;;
  --for) only=${2:?} && shift 2 ;;
esac
python=${1:-python3}
missing=

need() { missing="$missing $1"; }
have() { command -v "$1" >/dev/null 2>&1; }

have g++ && have cc || need build-essential
if [ "$only" != plugin ]; then
  have cmake || need cmake
  have ninja || need ninja-build
  # Module images are packed by either (devproxy/hal/image), and known by a hash (csrc/base/image_hash.h).
  header() { echo "#include <$1>" | cc -E -x c - >/dev/null 2>&1; }
  header lz4.h || need liblz4-dev
  header zstd.h || need libzstd-dev
  header xxhash.h || need libxxhash-dev
  header openssl/ssl.h || need libssl-dev # of connections between hosts (hal/links/tls.cc), which load the library late
  json() { echo "#include <nlohmann/json_fwd.hpp>" | c++ -E -x c++ - >/dev/null 2>&1; }
  json || need nlohmann-json3-dev # of the server (csrc/base/json.h)
fi
if [ -z "$only" ]; then
  have flock || need util-linux
  have ip || need iproute2 # tests make hosts of network namespaces
fi
if [ "$only" = build ]; then
  : # the Python that builds is there
elif have "$python"; then
  [ -n "$only" ] || "$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
  # Python.h: the torch plugin has a part that torch loads as a Python extension.
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -e "$header" ] || need python3-dev
else
  need python3 && need python3-venv && need python3-dev
fi

[ -n "$missing" ] || exit 0
if [ -n "$check" ]; then
  echo "install_system.sh: the build lacks system packages; run as root: apt-get install$missing" >&2
  exit 2
fi
echo "installing:$missing"
if ! have apt-get; then
  echo "install_system.sh: these Debian packages are missing, and there is no apt-get:$missing" >&2
  exit 2
fi
if [ "$(id -u)" != 0 ]; then
  echo "install_system.sh: not root; run: sudo apt-get install$missing" >&2
  exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086
apt-get install -y -q --no-install-recommends $missing
