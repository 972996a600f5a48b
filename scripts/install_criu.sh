#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# CRIU 4.2 or later with pycriu, for checkpoints: the distribution's package where that is new enough, else built from
# the source package that the distribution's testing or unstable release has. Any version from 4.2 on is taken; the
# last line says which. Asks no package server when PREFIX already has it.
#   scripts/install_criu.sh [PREFIX]     default build/criu: PREFIX/sbin/criu, PREFIX/lib/pycriu, PREFIX/.ready
set -eu
cd "$(dirname "$0")/.."
prefix=${1:-build/criu}
oldest=4.2
packages="build-essential pkg-config libprotobuf-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler
  libnl-3-dev libnl-route-3-dev libcap-dev libbsd-dev libnet1-dev uuid-dev libdrm-dev"

fail() {
  echo "install_criu.sh: $1" >&2
  exit 2
}
# The version of a criu program or package, or nothing.
version_of() { "$1" --version 2>/dev/null | sed -n 's/^Version: *//p'; }
new_enough() { [ -n "$1" ] && dpkg --compare-versions "$1" ge "$oldest"; }

if [ -e "$prefix/.ready" ] && [ "$(cat "$prefix/.ready")" = "$(version_of "$prefix/sbin/criu")" ] &&
  [ -e "$prefix/lib/pycriu/rpc_pb2.py" ]; then
  exit 0
fi
for tool in apt-get apt-cache dpkg; do
  command -v $tool >/dev/null 2>&1 || fail "no $tool here; install CRIU $oldest or later yourself and name it by DEVPROXY_CRIU"
done
mkdir -p "$prefix/sbin" "$prefix/lib"
prefix=$(cd "$prefix" && pwd)
export DEBIAN_FRONTEND=noninteractive

# as_root_install PACKAGE...: the missing ones of these
as_root_install() {
  missing=
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
  done
  [ -n "$missing" ] || return 0
  [ "$(id -u)" = 0 ] || fail "not root; run: sudo apt-get install$missing"
  echo "installing:$missing"
  [ -n "${updated:-}" ] || apt-get update -qq
  updated=1
  # shellcheck disable=SC2086
  apt-get install -y -qq --no-install-recommends $missing
}

candidate=$(apt-cache policy criu | sed -n 's/^ *Candidate: *//p')
if [ "$candidate" != "(none)" ] && new_enough "$candidate" && [ -n "$(apt-cache search --names-only '^python3-pycriu$')" ]; then
  as_root_install criu python3-pycriu
  pycriu=$(dpkg -L python3-pycriu | sed -n 's,/rpc_pb2\.py$,,p' | head -n 1)
  ln -sfn "$(command -v criu || echo /usr/sbin/criu)" "$prefix/sbin/criu"
  ln -sfn "$pycriu" "$prefix/lib/pycriu"
else
  # shellcheck disable=SC2086
  as_root_install $packages
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  uri=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $codename" | sort -u | head -n 1)
  [ -n "$uri" ] || fail "no package repository of $codename is set up; CRIU's source package comes from there"
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -e $keyring ] || fail "$keyring is missing; run: apt-get install debian-archive-keyring"

  work=$prefix/source
  rm -rf "$work"
  mkdir -p "$work/parts" "$work/lists/partial" "$work/cache/archives/partial"
  printf 'Types: deb-src\nURIs: %s\nSuites: testing unstable\nComponents: main\nSigned-By: %s\n' "$uri" $keyring \
    > "$work/parts/source.sources"
  # Lists and cache of its own: the machine's package lists stay as they are.
  apt() {
    apt-get -qq -oDir::Etc::sourcelist=/dev/null -oDir::Etc::sourceparts="$work/parts" \
      -oDir::State::Lists="$work/lists" -oDir::Cache="$work/cache" -oAPT::Sandbox::User="$(id -un)" "$@"
  }
  apt update
  (cd "$work" && apt --tar-only --download-only source criu)
  tarball=$(find "$work" -maxdepth 1 -name 'criu_*.orig.tar.*' ! -name '*.asc' | head -n 1)
  [ -n "$tarball" ] || fail "the source package of criu has no upstream tarball"
  mkdir "$work/tree"
  tar -xf "$tarball" -C "$work/tree" --strip-components=1
  echo "building CRIU from $(basename "$tarball")"
  make -C "$work/tree" -s -j2 NO_GNUTLS=1 criu >"$work/make.log" 2>&1 &&
    make -C "$work/tree" -s NO_GNUTLS=1 lib >>"$work/make.log" 2>&1 || {
    tail -n 20 "$work/make.log" >&2
    fail "CRIU did not build; the log is $work/make.log"
  }
  rm -rf "$prefix/lib/pycriu"
  cp "$work/tree/criu/criu" "$prefix/sbin/criu"
  cp -r "$work/tree/lib/pycriu" "$prefix/lib/pycriu"
  [ -n "${KEEP_SOURCE:-}" ] || rm -rf "$work"
fi

version=$(version_of "$prefix/sbin/criu")
new_enough "$version" || fail "CRIU is ${version:-not runnable}, and $oldest or later is needed"
[ -e "$prefix/lib/pycriu/rpc_pb2.py" ] || fail "pycriu is not complete in $prefix/lib/pycriu"
echo "$version" > "$prefix/.ready"
echo "CRIU $version: $prefix/sbin/criu"
