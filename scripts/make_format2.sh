#!/usr/bin/env bash
# Made the cache of format 2 in tests/version/format2, which every later featcache opens, verifies and repairs: the
# examples' eight clips in a few kB, one of them extracted again with another channel, and one that is missing. It is not
# to be made again: formats are kept, and what is there was written when this one was new.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
to=$PWD/tests/version/format2 work=/tmp/featcache-format2 # a path that the cache holds, so the same on every machine
rm -rf "$work" "$to/cache" && mkdir "$work"
cp -r examples/speech examples/manifest.csv "$to/small.yaml" "$work"
cd "$work"
echo "nobody,speech/nobody.flac,,nobody,Nobody has said this." >> manifest.csv
extract() { featcache extract "$1" -c small.yaml -o cache --device cpu || [ $? = 3 ]; }
mv manifest.csv right.csv
sed '/^anna-4/s/,0,/,1,/' right.csv > manifest.csv
extract manifest.csv
featcache tag cache/small first
mv right.csv manifest.csv
extract manifest.csv
rm -rf cache/*/{runs,work,lock,index}
mv cache manifest.csv "$to"
rm -rf "$work"
