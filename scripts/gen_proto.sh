#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes devproxy/control/_pb from job.proto, or another folder of that content. Does nothing when nothing changed.
#   scripts/gen_proto.sh PYTHON [FOLDER]     a Python that has grpcio-tools
set -eu
cd "$(dirname "$0")/.."
source=devproxy/control/job.proto
out=${2:-devproxy/control/_pb}
set -- "$1" scripts/gen_proto.sh
"$1" -c 'import grpc_tools' 2>/dev/null || {
  echo "gen_proto.sh: $1 has no grpcio-tools; run: $1 -m pip install -r requirements/build.txt" >&2
  exit 2
}
stamp="$("$1" -c 'import importlib.metadata as m; print(m.version("grpcio-tools"))') $(cat "$source" "$2" | cksum)"
[ ! -e "$out/.stamp" ] || [ "$(cat "$out/.stamp")" != "$stamp" ] || exit 0
# Into a folder beside it, then renamed: two builds at once, or a killed one, leave no half-made module.
rm -rf "$out.$$"
mkdir -p "$out.$$/devproxy/control/_pb"
trap 'rm -rf "$out.$$"' EXIT
# The virtual folder makes the modules import each other as devproxy.control._pb.
"$1" -m grpc_tools.protoc -Idevproxy/control/_pb=devproxy/control --python_out="$out.$$" --pyi_out="$out.$$" \
  --grpc_python_out="$out.$$" devproxy/control/_pb/job.proto
made=$out.$$/devproxy/control/_pb
# Whoever imports a stub has imported gRPC with our settings first.
cat > "$made/__init__.py" <<'END'
"""Generated from job.proto by scripts/gen_proto.sh."""

import devproxy.control.quiet_grpc
END
echo "$stamp" > "$made/.stamp"
rm -rf "$out"
mv "$made" "$out"
